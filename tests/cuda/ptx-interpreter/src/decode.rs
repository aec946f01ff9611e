//! Decoding of statements to instructions: names become indices, constants registers, and opcodes
//! operations.

use std::collections::HashMap;

use super::error::Error;
use super::instr::Instr;
use super::memory::{GLOBALS, LOCAL, PARAM};
use super::operand::{Addr, Guard, Space, Special};
use super::reader::Reader;
use super::table::{Op, decode};
use super::text::{Operand, Statement, Variable, parse};

/// Kernel that is ready to run.
#[derive(Debug)]
pub struct Kernel {
    /// Name of the entry point.
    pub name: String,
    pub(crate) code: Vec<Instr>,
    /// Source text of each instruction.
    pub(crate) text: Vec<String>,
    pub(crate) registers: usize,
    pub(crate) predicates: usize,
    /// Initial values of registers; all others start as poison.
    pub(crate) initial: Vec<(u32, Special)>,
    /// Offset and size of each parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) param_bytes: usize,
    /// Bytes of a block's static shared memory. The dynamic part starts behind it.
    pub(crate) static_shared: usize,
    pub(crate) local_bytes: usize,
    pub(crate) globals: Vec<u8>,
    /// Size of a cluster in blocks.
    pub cluster: [u32; 3],
    /// Blocks per `tcgen05` instruction (`.cta_group`), the same for all instructions of a kernel.
    pub(crate) cta_group: Option<usize>,
    /// Maximum number of threads in a block, if the kernel declares it.
    pub max_threads: Option<u32>,
}

/// Shared memory that the system reserves before a block's own on sm_90 and later.
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
    /// Forward branches: instruction, label, and open scopes (by number) at the branch.
    branches: Vec<(usize, String, Vec<usize>)>,
    labels: HashMap<(usize, String), u32>,
    open: Vec<usize>,
    scope_count: usize,
}

impl Kernel {
    /// Parses the first kernel of a module in NVRTC's format.
    ///
    /// # Errors
    /// [`Error::Ptx`] for text that cannot be parsed. An opcode that is not modelled is an error
    /// only when it is executed.
    pub fn parse(ptx: &str) -> Result<Self, Error> {
        Self::parse_text(ptx).map_err(Error::Ptx)
    }

    fn parse_text(ptx: &str) -> Result<Self, String> {
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
            cta_group: None,
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
        // Static variables come before the dynamic array.
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
    /// Bytes of each parameter.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = usize> {
        self.params.iter().map(|(_, size)| *size)
    }

    /// Bytes of a block's static shared memory, without the system's.
    pub fn static_shared(&self) -> usize {
        self.static_shared - RESERVED_SHARED
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
            // Parameters of a call. Kernel parameters are not variables here.
            "local" | "param" => {
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
                // An unknown operation is an error only when it is executed.
                let mut reader = Reader { decoder: self, parts: &parts, operands: &operands, at: 0 };
                let (op, text) = match decode(&mut reader) {
                    Ok(op) => (op, text),
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

    /// Register of a source with `bits` bits.
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
            // Predicate 0 is never written, so it is false.
            Operand::Imm(value) => Ok((0, *value != 0)),
            _ => Err(format!("{operand:?} is no predicate")),
        }
    }

    /// Registers of `{a, b}`, or of a single operand.
    pub(crate) fn list(
        &mut self,
        operand: &Operand,
        mut one: impl FnMut(&mut Self, &Operand) -> Result<u32, String>,
    ) -> Result<Vec<u32>, String> {
        match operand {
            Operand::Vector(parts) => parts.iter().map(|part| one(self, part)).collect(),
            operand => Ok(vec![one(self, operand)?]),
        }
    }

    /// Notes a branch, whose label may follow.
    pub(crate) fn branch(&mut self, label: &str) {
        self.branches.push((self.kernel.code.len(), label.into(), self.open.clone()));
    }

    /// Checks that all `tcgen05` instructions are for as many blocks.
    pub(crate) fn cta_group(&mut self, parts: &[&str]) -> Result<(), String> {
        let Some(group) = parts.iter().find_map(|part| part.strip_prefix("cta_group::")) else { return Ok(()) };
        let blocks = group.parse().map_err(|_| format!("cta_group::{group}"))?;
        match *self.kernel.cta_group.get_or_insert(blocks) {
            first if first == blocks => Ok(()),
            first => Err(format!("an instruction before it has cta_group::{first}, and all of a kernel have the same")),
        }
    }

    pub(crate) fn address(&mut self, operand: &Operand, space: Space) -> Result<Addr, String> {
        match operand {
            Operand::Address(parts, offset) => Ok(Addr { space, base: self.source(&parts[0], 64)?, offset: *offset }),
            _ => Err(format!("{operand:?} is no address")),
        }
    }

    /// Parses `%p` or `%p|%q`.
    pub(crate) fn pair(&mut self, operand: &Operand) -> Result<(u32, Option<u32>), String> {
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
}
