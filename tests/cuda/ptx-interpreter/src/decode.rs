//! Decoding of statements to instructions: names become indices, constants registers, and opcodes
//! operations.

use std::collections::HashMap;

use super::error::Error;
use super::memory::{GLOBALS, LOCAL, PARAM};
use super::names::{Name, Names};
use super::operand::Special;
use super::reader::Reader;
use super::table::{Instr, Op, decode};
use super::text::{Statement, Variable, parse};

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

pub(crate) struct Decoder {
    names: Names,
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
            names: Names::default(),
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
            decoder.names.name(&param.name, Name::Address(PARAM + offset as u64));
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
        self.names.name(&variable.name, Name::Address(address));
    }

    fn statement(&mut self, statement: Statement) -> Result<(), String> {
        match statement {
            Statement::Open => {
                self.names.open();
                self.open.push(self.scope_count);
                self.scope_count += 1;
            }
            Statement::Close => {
                self.names.close();
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
                            Name::Predicate(self.names.new_predicate())
                        } else {
                            Name::Register(self.names.new_register())
                        };
                        self.names.name(&name, value);
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
                let guard = guard.map(|(name, negated)| Ok::<_, String>((self.names.predicate(&name)?, negated)));
                let guard = guard.transpose().map_err(|error| format!("{text}: {error}"))?;
                // An unknown operation is an error only when it is executed.
                let mut reader =
                    Reader { names: &mut self.names, parts: &parts, operands: &operands, at: 0, label: None };
                let decoded = decode(&mut reader);
                let label = reader.label.take();
                let (op, text) = match decoded {
                    Ok(op) => (op, text),
                    Err(error) => (Op::Unknown, format!("{text} ({error})")),
                };
                if let Some(label) = label {
                    self.branches.push((self.kernel.code.len(), label, self.open.clone()));
                }
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
        let Names { registers, predicates, initial, cta_group, .. } = self.names;
        Ok(Kernel { registers, predicates, initial, cta_group, ..self.kernel })
    }
}
