//! Operands of a statement, read one after the other.

use super::instr::{AtomicOp, Bulk, Logic};
use super::names::Names;
use super::operand::{Addr, ElementType, Guard, Space};
use super::text::Operand;

/// A statement that is being decoded.
pub(crate) struct Reader<'a> {
    pub names: &'a mut Names,
    /// Parts of the opcode between dots.
    pub parts: &'a [&'a str],
    /// All operands.
    pub operands: &'a [Operand],
    /// Number of operands that were read.
    pub at: usize,
    /// Label of a branch.
    pub label: Option<String>,
}

/// Kind of an operand in the table of instructions.
pub(crate) trait Kind {
    /// Decoded operand.
    type Out;

    /// Reads the next operand.
    fn read(o: &mut Reader) -> Result<Self::Out, String>;
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $(<const $bits:ident>)? -> $out:ty = |$o:ident| $read:expr;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $name$(<const $bits: u32>)?;

        impl$(<const $bits: u32>)? Kind for $name$(<$bits>)? {
            type Out = $out;

            fn read($o: &mut Reader) -> Result<$out, String> {
                $read
            }
        }
    )*};
}

kinds! {
    /// Register that is written.
    D -> u32 = |o| { let d = o.next()?; o.names.target(d) };
    /// Registers that are written: `{a, b}`, or one.
    Ds -> Vec<u32> = |o| { let d = o.next()?; o.names.list(d, Names::target) };
    /// Register or literal with the bits of the opcode's type.
    T -> u32 = |o| o.source(o.bits());
    /// The same, several.
    Ts -> Vec<u32> = |o| { let bits = o.bits(); o.sources(bits) };
    /// Register or literal of this many bits.
    S<const BITS> -> u32 = |o| o.source(BITS);
    /// The same, several.
    Ss<const BITS> -> Vec<u32> = |o| o.sources(BITS);
    /// Predicate that is written: `%p`, `%p|%q`.
    P -> (u32, Option<u32>) = |o| { let p = o.next()?; o.names.pair(p) };
    /// Register that is written, and an optional predicate: `%r`, `%r|%p`.
    DP -> (u32, Option<u32>) = |o| match o.next()? {
        Operand::Pair(d, p) => {
            let d = if d == "_" { Operand::Sink } else { Operand::Name(d.clone()) };
            let p = if p == "_" { None } else { Some(o.names.predicate(p)?) };
            Ok((o.names.target(&d)?, p))
        }
        d => Ok((o.names.target(d)?, None)),
    };
    /// Predicate that is read.
    G -> Guard = |o| { let p = o.next()?; o.names.guard(p) };
    /// Literal.
    Lit -> u32 = |o| match o.next()? {
        Operand::Imm(value) => Ok(*value as u32),
        other => Err(format!("{other:?} is no literal")),
    };
    /// Address in the opcode's space.
    A -> Addr = |o| o.address(space(o.parts));
    /// Address in shared memory.
    Shared -> Addr = |o| o.address(Space::Shared);
    /// Address in global memory, or a plain number of tensor memory.
    Plain -> Addr = |o| o.address(Space::Global);
    /// Tensor with coordinates, or an address of bytes.
    Global -> Bulk = |o| match o.next()? {
        Operand::Address(parts, 0) if o.has("tensor") && parts.len() == 2 => {
            let map = o.names.source(&parts[0], 64)?;
            Ok(Bulk::Tensor { map, coords: o.names.list(&parts[1], |names, s| names.source(s, 32))? })
        }
        bytes if !o.has("tensor") => {
            let address = o.names.address(bytes, Space::Global)?;
            // The size follows both addresses.
            let size = o.operands.get(2).ok_or("the size is missing")?;
            o.at += usize::from(o.at == 2);
            Ok(Bulk::Bytes { address, size: o.names.source(size, 32)? })
        }
        other => Err(format!("{other:?} is no tensor with coordinates")),
    };
}

impl<'a> Reader<'a> {
    pub(crate) fn next(&mut self) -> Result<&'a Operand, String> {
        self.at += 1;
        self.operands.get(self.at - 1).ok_or_else(|| format!("operand {} is missing", self.at - 1))
    }

    pub(crate) fn read<K: Kind>(&mut self) -> Result<K::Out, String> {
        K::read(self)
    }

    /// Reads an operand if the condition holds.
    pub(crate) fn read_if<K: Kind>(&mut self, condition: bool) -> Result<Option<K::Out>, String> {
        condition.then(|| K::read(self)).transpose()
    }

    /// Whether there are operands to read.
    pub(crate) fn more(&self) -> bool {
        self.at < self.operands.len()
    }

    pub(crate) fn has(&self, modifier: &str) -> bool {
        self.parts.contains(&modifier)
    }

    /// Whether a part of the opcode begins so.
    pub(crate) fn begins(&self, prefix: &str) -> bool {
        self.parts.iter().any(|part| part.starts_with(prefix))
    }

    /// Type of the opcode: its last part.
    pub(crate) fn ty(&self) -> &'a str {
        self.parts.last().copied().unwrap_or("")
    }

    /// Bits of the type.
    pub(crate) fn bits(&self) -> u32 {
        bits(self.ty())
    }

    /// Number of parts of an operand.
    pub(crate) fn length(&self, operand: usize) -> u32 {
        match self.operands.get(operand) {
            Some(Operand::Vector(parts)) => parts.len() as u32,
            _ => 0,
        }
    }

    fn source(&mut self, bits: u32) -> Result<u32, String> {
        let operand = self.next()?;
        self.names.source(operand, bits)
    }

    fn sources(&mut self, bits: u32) -> Result<Vec<u32>, String> {
        let operand = self.next()?;
        self.names.list(operand, |names, operand| names.source(operand, bits))
    }

    fn address(&mut self, space: Space) -> Result<Addr, String> {
        let operand = self.next()?;
        self.names.address(operand, space)
    }

    /// Logical operation of the opcode.
    pub(crate) fn logic(&self) -> Option<Logic> {
        let names = [("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)];
        names.into_iter().find(|(name, _)| self.has(name)).map(|(_, logic)| logic)
    }

    /// Atomic operation of the opcode.
    pub(crate) fn atomic(&self) -> Result<AtomicOp, String> {
        use AtomicOp::{Add, And, Cas, Decrement, Exchange, Increment, Max, Min, Or, Xor};
        let names = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
        let ops = [Add, Min, Max, And, Or, Xor, Exchange, Cas, Increment, Decrement];
        known(names.iter().position(|name| self.has(name)).map(|i| ops[i]))
    }
}

/// Result of a form that may not be modelled.
pub(crate) fn known<T>(found: Option<T>) -> Result<T, String> {
    found.ok_or_else(|| "this form is not modelled".into())
}

/// State space in an opcode.
fn space(parts: &[&str]) -> Space {
    let of = |part: &&str| match *part {
        "global" | "const" => Some(Space::Global),
        "shared" | "shared::cta" | "shared::cluster" => Some(Space::Shared),
        "local" => Some(Space::Local),
        "param" | "param::entry" => Some(Space::Param),
        _ => None,
    };
    parts.iter().find_map(of).unwrap_or(Space::Generic)
}

impl Reader<'_> {
    /// State space of the opcode.
    pub(crate) fn space(&self) -> Space {
        space(self.parts)
    }
}

/// Number of bits of a type.
pub(crate) fn bits(ty: &str) -> u32 {
    match ty {
        "f16x2" | "bf16x2" => 32,
        "e4m3x2" | "e5m2x2" | "ue8m0x2" | "bf16" => 16,
        _ => ty.get(1..).and_then(|digits| digits.parse().ok()).unwrap_or(32),
    }
}

/// Element types of a matrix instruction, in the order of the opcode.
pub(crate) fn element_types(parts: &[&str]) -> Vec<ElementType> {
    parts.iter().filter_map(|part| ElementType::of(part)).collect()
}
