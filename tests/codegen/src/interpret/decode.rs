//! Statements to instructions: names become indices, each constant a register, opcodes the operation that they name.

use std::collections::HashMap;

use super::alu::{alu, compare};
use super::convert::Convert;
use super::instr::{Addr, AtomicOp, Barrier, ElementType, Guard, Instr, Logic, Op, Shuffle, Space, Special, Vote};
use super::memory::{GLOBALS, LOCAL, PARAM};
use super::text::{Operand, Statement, Variable, parse};

/// A kernel ready to run.
#[derive(Debug)]
pub struct Kernel {
    /// The entry point.
    pub name: String,
    pub(crate) code: Vec<Instr>,
    /// The source of each instruction.
    pub(crate) text: Vec<String>,
    pub(crate) registers: usize,
    pub(crate) predicates: usize,
    /// What registers hold when a thread starts; others hold poison.
    pub(crate) initial: Vec<(u32, Special)>,
    /// Offset and size of each parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) param_bytes: usize,
    /// Static shared memory of a block, and the alignment and offset of the dynamic one behind it.
    pub(crate) static_shared: usize,
    pub(crate) local_bytes: usize,
    pub(crate) globals: Vec<u8>,
    /// Blocks of a cluster.
    pub(crate) cluster: [u32; 3],
    pub(crate) max_threads: Option<u32>,
}

/// Shared memory that the system keeps in front of a block's own on sm_90 and later.
const RESERVED_SHARED: usize = 1024;

#[derive(Clone, Copy)]
enum Name {
    Register(u32),
    Predicate(u32),
    Address(u64),
}

pub(crate) struct Decoder {
    scopes: Vec<HashMap<String, Name>>,
    constants: HashMap<u64, u32>,
    specials: HashMap<String, u32>,
    kernel: Kernel,
    /// Branches to labels that stand further down: instruction, name, open scopes (by number) at the branch.
    branches: Vec<(usize, String, Vec<usize>)>,
    labels: HashMap<(usize, String), u32>,
    open: Vec<usize>,
    scope_count: usize,
}

impl Kernel {
    /// The first kernel of a module as NVRTC writes it.
    ///
    /// # Errors
    /// What of the text is not understood. An opcode that is not modelled is an error only where it is reached.
    pub fn parse(ptx: &str) -> Result<Self, String> {
        let (variables, entry) = parse(ptx)?;
        let kernel = Kernel {
            name: entry.name,
            code: vec![],
            text: vec![],
            registers: 1,
            predicates: 1,
            initial: vec![],
            params: vec![],
            param_bytes: 0,
            static_shared: RESERVED_SHARED,
            local_bytes: 0,
            globals: vec![],
            cluster: entry.cluster.unwrap_or([1; 3]),
            max_threads: entry.max_threads,
        };
        let mut decoder = Decoder {
            scopes: vec![HashMap::new()],
            constants: HashMap::new(),
            specials: HashMap::new(),
            kernel,
            branches: vec![],
            labels: HashMap::new(),
            open: vec![0],
            scope_count: 1,
        };
        for param in &entry.params {
            let offset = decoder.kernel.param_bytes.next_multiple_of(param.align.max(1));
            decoder.kernel.params.push((offset, param.size));
            decoder.kernel.param_bytes = offset + param.size;
            decoder.name(&param.name, Name::Address(PARAM + offset as u64));
        }
        // Static variables first: the dynamic array comes behind them.
        for variable in variables.iter().filter(|variable| !variable.extern_) {
            decoder.variable(variable);
        }
        let in_body = |statement: &Statement| matches!(statement, Statement::Variable(v) if v.space == "shared");
        for statement in entry.body.iter().filter(|statement| in_body(statement)) {
            if let Statement::Variable(variable) = statement {
                decoder.variable(variable);
            }
        }
        for variable in variables.iter().filter(|variable| variable.extern_) {
            decoder.variable(variable);
        }
        for statement in entry.body {
            decoder.statement(statement)?;
        }
        decoder.finish()
    }
}

impl Kernel {
    /// How many parameters it takes.
    pub fn parameters(&self) -> usize {
        self.params.len()
    }
}

impl Decoder {
    fn name(&mut self, name: &str, value: Name) {
        self.scopes.last_mut().expect("a scope is open").insert(name.into(), value);
    }

    fn variable(&mut self, variable: &Variable) {
        let kernel = &mut self.kernel;
        let align = variable.align.max(1);
        let address = match variable.space.as_str() {
            "shared" => {
                kernel.static_shared = kernel.static_shared.next_multiple_of(align);
                let address = kernel.static_shared as u64;
                kernel.static_shared += variable.size;
                address
            }
            "local" => {
                kernel.local_bytes = kernel.local_bytes.next_multiple_of(align);
                let address = LOCAL + kernel.local_bytes as u64;
                kernel.local_bytes += variable.size;
                address
            }
            _ => {
                let start = kernel.globals.len().next_multiple_of(align);
                kernel.globals.resize(start, 0);
                kernel.globals.extend(&variable.init);
                kernel.globals.resize(start + variable.size, 0);
                GLOBALS + start as u64
            }
        };
        self.name(&variable.name, Name::Address(address));
    }

    fn statement(&mut self, statement: Statement) -> Result<(), String> {
        match statement {
            Statement::Open => {
                self.scopes.push(HashMap::new());
                self.open.push(self.scope_count);
                self.scope_count += 1;
            }
            Statement::Close => {
                self.scopes.pop();
                self.open.pop();
            }
            Statement::Label(name) => {
                let at = self.kernel.code.len() as u32;
                self.labels.insert((*self.open.last().expect("a scope is open"), name), at);
            }
            Statement::Registers(predicates, names) => {
                for (name, count) in names {
                    let all = match count {
                        Some(count) => (0..count).map(|i| format!("{name}{i}")).collect(),
                        None => vec![name],
                    };
                    for name in all {
                        let value = if predicates {
                            Name::Predicate(self.new_predicate())
                        } else {
                            Name::Register(self.new_register())
                        };
                        self.name(&name, value);
                    }
                }
            }
            Statement::Variable(variable) => {
                if variable.space != "shared" {
                    self.variable(&variable);
                }
            }
            Statement::Instruction { guard, opcode, operands, text } => {
                let parts: Vec<&str> = opcode.iter().map(String::as_str).collect();
                let guard = guard.map(|(name, negated)| Ok::<_, String>((self.predicate(&name)?, negated)));
                let guard = guard.transpose().map_err(|error| format!("{text}: {error}"))?;
                // What is not understood is an error where it is reached.
                let (op, text) = match self.op(&parts, &operands) {
                    Ok(op) => (op.unwrap_or(Op::Unknown), text),
                    Err(error) => (Op::Unknown, format!("{text} ({error})")),
                };
                self.kernel.code.push(Instr { guard, op });
                self.kernel.text.push(text);
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Kernel, String> {
        for (at, name, open) in &self.branches {
            let target = open.iter().rev().find_map(|scope| self.labels.get(&(*scope, name.clone())));
            let target = *target.ok_or_else(|| format!("no label {name}"))?;
            self.kernel.code[*at].op = Op::Branch { target };
        }
        // Falling off the end is a return.
        self.kernel.code.push(Instr { guard: None, op: Op::Exit });
        self.kernel.text.push("end of the kernel".into());
        Ok(self.kernel)
    }

    pub(crate) fn new_register(&mut self) -> u32 {
        self.kernel.registers += 1;
        self.kernel.registers as u32 - 1
    }

    pub(crate) fn new_predicate(&mut self) -> u32 {
        self.kernel.predicates += 1;
        self.kernel.predicates as u32 - 1
    }

    fn look_up(&self, name: &str) -> Option<Name> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    pub(crate) fn predicate(&self, name: &str) -> Result<u32, String> {
        match self.look_up(name) {
            Some(Name::Predicate(p)) => Ok(p),
            _ => Err(format!("no predicate {name}")),
        }
    }

    pub(crate) fn constant(&mut self, value: u64) -> u32 {
        if let Some(register) = self.constants.get(&value) {
            return *register;
        }
        let register = self.new_register();
        self.constants.insert(value, register);
        self.kernel.initial.push((register, Special::Constant(value)));
        register
    }

    /// The register of a source of so many bits.
    pub(crate) fn source(&mut self, operand: &Operand, bits: u32) -> Result<u32, String> {
        match operand {
            Operand::Imm(value) => Ok(self.constant(value & (u64::MAX >> (64 - bits)))),
            Operand::Name(name) => match self.look_up(name) {
                Some(Name::Register(register)) => Ok(register),
                Some(Name::Address(address)) => Ok(self.constant(address)),
                Some(Name::Predicate(_)) => Err(format!("{name} is no register")),
                None => {
                    if let Some(register) = self.specials.get(name) {
                        return Ok(*register);
                    }
                    let special = match name.as_str() {
                        "WARP_SZ" => Special::Constant(32),
                        _ => Special::of(name).ok_or_else(|| format!("no register {name}"))?,
                    };
                    let register = self.new_register();
                    self.specials.insert(name.clone(), register);
                    self.kernel.initial.push((register, special));
                    Ok(register)
                }
            },
            _ => Err(format!("{operand:?} is no register")),
        }
    }

    pub(crate) fn target(&mut self, operand: &Operand) -> Result<u32, String> {
        match operand {
            Operand::Sink => Ok(self.new_register()),
            Operand::Name(name) => match self.look_up(name) {
                Some(Name::Register(register)) => Ok(register),
                _ => Err(format!("no register {name}")),
            },
            _ => Err(format!("{operand:?} takes no result")),
        }
    }

    pub(crate) fn guard(&mut self, operand: &Operand) -> Result<Guard, String> {
        match operand {
            Operand::Name(name) => Ok((self.predicate(name)?, false)),
            Operand::Not(name) => Ok((self.predicate(name)?, true)),
            // Predicate 0 is never written: false.
            Operand::Imm(value) => Ok((0, *value != 0)),
            _ => Err(format!("{operand:?} is no predicate")),
        }
    }

    /// Registers of `{a, b}`, or of one operand alone.
    pub(crate) fn sources(&mut self, operand: &Operand, bits: u32) -> Result<Vec<u32>, String> {
        match operand {
            Operand::Vector(parts) => parts.iter().map(|part| self.source(part, bits)).collect(),
            one => Ok(vec![self.source(one, bits)?]),
        }
    }

    pub(crate) fn targets(&mut self, operand: &Operand) -> Result<Vec<u32>, String> {
        match operand {
            Operand::Vector(parts) => parts.iter().map(|part| self.target(part)).collect(),
            one => Ok(vec![self.target(one)?]),
        }
    }

    pub(crate) fn address(&mut self, operand: &Operand, space: Space) -> Result<Addr, String> {
        match operand {
            Operand::Address(parts, offset) => Ok(Addr { space, base: self.source(&parts[0], 64)?, offset: *offset }),
            _ => Err(format!("{operand:?} is no address")),
        }
    }

    /// `%p` or `%p|%q`.
    fn pair(&mut self, operand: &Operand) -> Result<(u32, Option<u32>), String> {
        match operand {
            Operand::Name(name) => Ok((self.predicate(name)?, None)),
            Operand::Sink => Ok((self.new_predicate(), None)),
            Operand::Pair(a, b) => {
                let a = if a == "_" { self.new_predicate() } else { self.predicate(a)? };
                Ok((a, if b == "_" { None } else { Some(self.predicate(b)?) }))
            }
            _ => Err(format!("{operand:?} is no predicate")),
        }
    }

    /// The operation, or nothing if it is not modelled.
    fn op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let ty = parts.last().copied().unwrap_or("");
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        let op = match parts[0] {
            "bra" => {
                let Operand::Name(label) = operand(0)? else { return Err("no label".into()) };
                self.branches.push((self.kernel.code.len(), label.clone(), self.open.clone()));
                Op::Nop
            }
            "ret" | "exit" => Op::Exit,
            "trap" | "brkpt" => Op::Trap,
            "membar" | "pragma" | "nanosleep" | "prefetch" | "prefetchu" | "setmaxnreg" | "griddepcontrol"
            | "discard" | "applypriority" => Op::Nop,
            "fence" if has("proxy") && parts.iter().any(|part| part.starts_with("async")) => Op::FenceProxy,
            "fence" => Op::Nop,
            "setp" => {
                let Some(compare) = compare(parts[1], ty) else { return Ok(None) };
                let logic = ["and", "or", "xor"].into_iter().find(|logic| has(logic)).and_then(logic);
                let combine = match logic {
                    Some(logic) => Some((logic, self.guard(operand(3)?)?)),
                    None => None,
                };
                let (d, d2) = self.pair(operand(0)?)?;
                let bits = bits(ty);
                let (a, b) = (self.source(operand(1)?, bits)?, self.source(operand(2)?, bits)?);
                Op::Setp { compare, d, d2, a, b, combine }
            }
            "selp" => {
                let bits = bits(ty);
                let (a, b) = (self.source(operand(1)?, bits)?, self.source(operand(2)?, bits)?);
                Op::Selp { d: self.target(operand(0)?)?, a, b, p: self.guard(operand(3)?)? }
            }
            "and" | "or" | "xor" | "not" | "mov" if ty == "pred" => {
                let (d, _) = self.pair(operand(0)?)?;
                let a = self.guard(operand(1)?)?;
                match parts[0] {
                    "mov" => Op::Predicate { logic: Logic::Or, d, a, b: (0, false) },
                    "not" => Op::Predicate { logic: Logic::Or, d, a: (a.0, !a.1), b: (0, false) },
                    name => {
                        let logic = logic(name).expect("one of the three");
                        Op::Predicate { logic, d, a, b: self.guard(operand(2)?)? }
                    }
                }
            }
            "mov" if bits(ty) > 64 => return Ok(None),
            "mov" if matches!(operand(1)?, Operand::Vector(_)) => {
                let parts = self.sources(operand(1)?, 64)?;
                let bits = bits(ty) / parts.len() as u32;
                Op::Pack { d: self.target(operand(0)?)?, parts, bits }
            }
            "mov" if matches!(operand(0)?, Operand::Vector(_)) => {
                let parts = self.targets(operand(0)?)?;
                let bits = bits(ty) / parts.len() as u32;
                Op::Unpack { parts, a: self.source(operand(1)?, 64)?, bits }
            }
            "cvta" if has("shared") || has("shared::cta") || has("shared::cluster") => {
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 64)?);
                Op::ToShared { d, a, to_generic: !has("to") }
            }
            "isspacep" => {
                let (d, _) = self.pair(operand(0)?)?;
                Op::Isspacep { d, a: self.source(operand(1)?, 64)?, space: space(parts) }
            }
            "cvt" => {
                let Some(convert) = Convert::of(parts).filter(Convert::known) else { return Ok(None) };
                let d = self.target(operand(0)?)?;
                let bits = bits(ty);
                let a = self.source(operand(1)?, bits)?;
                let b = if convert.packs() { self.source(operand(2)?, bits)? } else { 0 };
                Op::Convert { convert, d, a, b }
            }
            "lop3" if parts.len() == 2 => {
                let Operand::Imm(table) = operand(4)? else { return Err("no truth table".into()) };
                let mut s = [0; 3];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, 32)?;
                }
                Op::Lop3 { d: self.target(operand(0)?)?, s, table: *table as u32 }
            }
            "bfi" => {
                let mut s = [0; 4];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, if i < 2 { bits(ty) } else { 32 })?;
                }
                Op::Bfi { d: self.target(operand(0)?)?, s, bits: u64::from(bits(ty)) }
            }
            "ld" | "ldu" => {
                let d = self.targets(operand(0)?)?;
                if bits(ty) > 64 {
                    return Ok(None);
                }
                let address = self.address(operand(1)?, space(parts))?;
                Op::Load { d, address, bytes: bits(ty) / 8, signed: ty.starts_with('s') }
            }
            "st" => {
                if has("async") || bits(ty) > 64 {
                    return Ok(None);
                }
                let address = self.address(operand(0)?, space(parts))?;
                Op::Store { s: self.sources(operand(1)?, bits(ty))?, address, bytes: bits(ty) / 8 }
            }
            "atom" | "red" if !has("async") => return self.atomic(parts, operands),
            "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" | "ldmatrix" | "stmatrix" => {
                return self.warp_op(parts, operands);
            }
            "bar" | "barrier" | "mapa" | "getctarank" => return self.block_op(parts, operands),
            "mbarrier" => return self.mbarrier(parts, operands),
            "cp" => return self.copy(parts, operands),
            "mma" | "wmma" | "wgmma" => return self.matrix_op(parts, operands),
            _ => {
                let Some((arity, function)) = alu(parts).filter(|(arity, _)| arity + 1 == operands.len()) else {
                    return Ok(None);
                };
                let wide = parts[0] == "mad" && has("wide");
                let mut o = [self.target(operand(0)?)?, 0, 0, 0];
                for i in 1..=arity {
                    let bits = if wide && i == 3 { 64 } else { bits(ty) };
                    o[i] = self.source(operand(i)?, bits)?;
                }
                Op::Alu(function, o)
            }
        };
        Ok(Some(op))
    }

    fn atomic(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let names = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let ops = {
            use AtomicOp::{Add, And, Cas, Decrement, Exchange, Increment, Max, Min, Or, Xor};
            [Add, Min, Max, And, Or, Xor, Exchange, Cas, Increment, Decrement]
        };
        let Some(op) = names.iter().position(|name| parts.contains(name)).map(|i| ops[i]) else { return Ok(None) };
        let types = ["u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "b16"];
        let last = parts.last().copied().unwrap_or("");
        let Some(ty) = types.into_iter().find(|ty| *ty == last) else { return Ok(None) };
        if parts.iter().any(|part| ["v2", "v4", "v8"].contains(part)) {
            return Ok(None);
        }
        let (d, rest) = match (parts[0], operands) {
            ("red", rest) => (self.new_register(), rest),
            (_, [d, rest @ ..]) => (self.target(d)?, rest),
            _ => return Err("operands are missing".into()),
        };
        let [address, a, more @ ..] = rest else { return Err("operands are missing".into()) };
        let address = self.address(address, space(parts))?;
        let a = self.source(a, bits(ty))?;
        let b = match (op, more.first()) {
            (AtomicOp::Cas, Some(b)) => self.source(b, bits(ty))?,
            _ => 0,
        };
        Ok(Some(Op::Atomic { op, ty, d, address, a, b }))
    }

    fn warp_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        // `%r1|%p1`: a register and a predicate.
        let with_predicate = |decoder: &mut Self| match operand(0)? {
            Operand::Pair(d, p) => {
                let d = if d == "_" { Operand::Sink } else { Operand::Name(d.clone()) };
                let p = if p == "_" { None } else { Some(decoder.predicate(p)?) };
                Ok::<_, String>((decoder.target(&d)?, p))
            }
            d => Ok((decoder.target(d)?, None)),
        };
        Ok(Some(match parts[0] {
            "shfl" if has("sync") => {
                let kind = match parts[2] {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Butterfly,
                    _ => Shuffle::Index,
                };
                let (d, p) = with_predicate(self)?;
                let mut s = [0; 4];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = self.source(operand(i + 1)?, 32)?;
                }
                Op::Shuffle { kind, d, p, a: s[0], b: s[1], c: s[2], mask: s[3] }
            }
            "vote" if has("sync") => {
                let kind = match parts[2] {
                    "all" => Vote::All,
                    "any" => Vote::Any,
                    "uni" => Vote::Uniform,
                    _ => Vote::Ballot,
                };
                let d = match kind {
                    Vote::Ballot => self.target(operand(0)?)?,
                    _ => self.pair(operand(0)?)?.0,
                };
                Op::Vote { kind, d, p: self.guard(operand(1)?)?, mask: self.source(operand(2)?, 32)? }
            }
            "match" => {
                let (d, p) = with_predicate(self)?;
                let a = self.source(operand(1)?, 64)?;
                Op::Match { d, p, a, mask: self.source(operand(2)?, 32)?, all: has("all") }
            }
            "redux" => {
                let names = ["add", "min", "max", "and", "or", "xor"];
                let ops = [AtomicOp::Add, AtomicOp::Min, AtomicOp::Max, AtomicOp::And, AtomicOp::Or, AtomicOp::Xor];
                let Some(op) = names.iter().position(|name| has(name)).map(|i| ops[i]) else { return Ok(None) };
                if has("f32") {
                    return Ok(None);
                }
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 32)?);
                Op::Redux { op, signed: has("s32"), d, a, mask: self.source(operand(2)?, 32)? }
            }
            "elect" => {
                let (d, p) = with_predicate(self)?;
                let p = p.unwrap_or_else(|| self.new_predicate());
                Op::Elect { d, p, mask: self.source(operand(1)?, 32)? }
            }
            "activemask" => Op::Activemask { d: self.target(operand(0)?)? },
            "ldmatrix" if has("m8n8") && has("b16") => {
                let d = self.targets(operand(0)?)?;
                Op::Ldmatrix { d, address: self.address(operand(1)?, Space::Shared)?, transposed: has("trans") }
            }
            "stmatrix" if has("m8n8") && has("b16") => {
                let address = self.address(operand(0)?, Space::Shared)?;
                Op::Stmatrix { s: self.sources(operand(1)?, 32)?, address, transposed: has("trans") }
            }
            _ => return Ok(None),
        }))
    }

    fn block_op(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let operand = |i: usize| operands.get(i).ok_or_else(|| format!("operand {i} is missing"));
        Ok(Some(match parts {
            ["bar", "warp", "sync"] => Op::SyncWarp { mask: self.source(operand(0)?, 32)? },
            ["barrier", "cluster", "arrive", ..] => Op::ClusterArrive,
            ["barrier", "cluster", "wait", ..] => Op::ClusterWait,
            ["bar" | "barrier", ..] if !has("red") && (has("sync") || has("arrive")) => {
                let id = self.source(operand(0)?, 32)?;
                let count = operands.get(1).map(|count| self.source(count, 32)).transpose()?;
                // `bar` is `barrier.aligned`.
                Op::Bar { id, count, wait: has("sync"), aligned: parts[0] == "bar" || has("aligned") }
            }
            ["mapa", ..] => {
                let generic = !has("shared::cluster");
                let (d, a) = (self.target(operand(0)?)?, self.source(operand(1)?, 64)?);
                Op::Mapa { d, a, rank: self.source(operand(2)?, 32)?, generic }
            }
            _ => return Ok(None),
        }))
    }

    fn mbarrier(&mut self, parts: &[&str], operands: &[Operand]) -> Result<Option<Op>, String> {
        let has = |modifier: &str| parts.contains(&modifier);
        let mut rest = operands;
        let at = if parts.iter().any(|part| part.starts_with("shared")) { Space::Shared } else { Space::Generic };
        if matches!(parts[1], "test_wait" | "try_wait") {
            let [p, address, value, ..] = operands else { return Err("operands are missing".into()) };
            let (p, _) = self.pair(p)?;
            let address = self.address(address, at)?;
            let value = self.source(value, 64)?;
            let may_block = parts[1] == "try_wait";
            return Ok(Some(Op::MbarrierWait { p, address, value, parity: has("parity"), may_block }));
        }
        let op = match parts[1] {
            "init" => Barrier::Init,
            "inval" => Barrier::Invalidate,
            "expect_tx" => Barrier::ExpectTx,
            "complete_tx" => Barrier::CompleteTx,
            "arrive" if !has("noComplete") => Barrier::Arrive { expect: has("expect_tx"), drop: false },
            "arrive_drop" if !has("noComplete") => Barrier::Arrive { expect: has("expect_tx"), drop: true },
            _ => return Ok(None),
        };
        let d = match rest {
            [Operand::Address(..), ..] => self.new_register(),
            [d, others @ ..] => {
                rest = others;
                self.target(d)?
            }
            [] => return Err("operands are missing".into()),
        };
        let [address, value @ ..] = rest else { return Err("operands are missing".into()) };
        let address = self.address(address, at)?;
        let value = value.first().map(|value| self.source(value, 32)).transpose()?;
        Ok(Some(Op::Mbarrier { op, d, address, value }))
    }
}

fn logic(name: &str) -> Option<Logic> {
    Some(match name {
        "and" => Logic::And,
        "or" => Logic::Or,
        "xor" => Logic::Xor,
        _ => return None,
    })
}

/// The state space that an opcode names.
pub(crate) fn space(parts: &[&str]) -> Space {
    for part in parts {
        match *part {
            "global" | "const" => return Space::Global,
            "shared" | "shared::cta" | "shared::cluster" => return Space::Shared,
            "local" => return Space::Local,
            "param" | "param::entry" => return Space::Param,
            _ => {}
        }
    }
    Space::Generic
}

/// The bits of a type.
pub(crate) fn bits(ty: &str) -> u32 {
    if matches!(ty, "f16x2" | "bf16x2") {
        return 32;
    }
    if matches!(ty, "e4m3x2" | "e5m2x2" | "ue8m0x2") {
        return 16;
    }
    if ty == "bf16" {
        return 16;
    }
    ty.get(1..).and_then(|digits| digits.parse().ok()).unwrap_or(32)
}

/// The element types of a matrix instruction, in the order of the opcode.
pub(crate) fn element_types(parts: &[&str]) -> Vec<ElementType> {
    parts.iter().filter_map(|part| ElementType::of(part)).collect()
}
