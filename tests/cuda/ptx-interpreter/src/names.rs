//! Names of a kernel: registers, predicates and variables by scope, and constants, which have
//! registers of their own.

use std::collections::HashMap;

use super::operand::{Addr, Guard, Space, Special};
use super::text::Operand;

#[derive(Clone, Copy)]
pub(crate) enum Name {
    Register(u32),
    Predicate(u32),
    Address(u64),
}

/// Names so far. Register 0 and predicate 0 have none.
pub(crate) struct Names {
    scopes: Vec<HashMap<String, Name>>,
    constants: HashMap<u64, u32>,
    specials: HashMap<String, u32>,
    pub registers: usize,
    pub predicates: usize,
    /// Initial values of registers.
    pub initial: Vec<(u32, Special)>,
    pub cta_group: Option<usize>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            scopes: vec![HashMap::new()],
            constants: HashMap::new(),
            specials: HashMap::new(),
            registers: 1,
            predicates: 1,
            initial: vec![],
            cta_group: None,
        }
    }
}

impl Names {
    /// Opens a scope.
    pub(crate) fn open(&mut self) {
        self.scopes.push(HashMap::new());
    }

    /// Closes the last scope.
    pub(crate) fn close(&mut self) {
        self.scopes.pop();
    }

    pub(crate) fn name(&mut self, name: &str, value: Name) {
        self.scopes.last_mut().expect("a scope is open").insert(name.into(), value);
    }

    pub(crate) fn new_register(&mut self) -> u32 {
        self.registers += 1;
        self.registers as u32 - 1
    }

    pub(crate) fn new_predicate(&mut self) -> u32 {
        self.predicates += 1;
        self.predicates as u32 - 1
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
        self.initial.push((register, Special::Constant(value)));
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
                    self.initial.push((register, special));
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

    /// Checks that all `tcgen05` instructions have the same `cta_group`.
    pub(crate) fn cta_group(&mut self, parts: &[&str]) -> Result<(), String> {
        let Some(group) = parts.iter().find_map(|part| part.strip_prefix("cta_group::")) else { return Ok(()) };
        let blocks = group.parse().map_err(|_| format!("cta_group::{group}"))?;
        match *self.cta_group.get_or_insert(blocks) {
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
