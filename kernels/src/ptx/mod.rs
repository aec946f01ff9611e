//! PTX instructions as `#[cube]` functions, for operations that CubeCL 0.10 does not have.
//!
//! CubeCL prints a comment that contains a newline as `/* content */`, unescaped. So
//! `\n*/ code /*\n` is C++ in the kernel. Operands are named as in cubecl-cpp 0.10.0. A changed
//! name does not compile, and the code-generation test compiles every kernel. Other compilers print
//! comments too, so callers need a comptime check of the device.

// Parameters of an intrinsic are only used while a kernel is generated.
#![allow(unused_variables)]

#[macro_use]
mod macros;

pub(crate) mod barrier;
pub(crate) mod cvt;
pub(crate) mod memory;
pub(crate) mod mma;
pub(crate) mod shared;
pub(crate) mod tcgen05;
pub(crate) mod tma;
pub(crate) mod wgmma;

use std::ops::Range;

use cubecl::ir::{Instruction, NonSemantic, Operation, Scope, Variable, VariableKind};

/// Constraint, such as `=r`, and C++ expression.
type Operand = (&'static str, String);

/// Adds a C++ statement to the kernel.
fn statement(scope: &mut Scope, code: &str) {
    scope.register(NonSemantic::Comment { content: format!("\n*/ {code} /*\n") });
}

/// Name of a variable in cubecl-cpp.
///
/// # Panics
/// For kinds without a C++ name, such as builtins. Pass those through [`operand`].
fn name(variable: &Variable) -> String {
    match variable.kind {
        VariableKind::LocalMut { id } | VariableKind::Versioned { id, .. } => format!("l_mut_{id}"),
        VariableKind::LocalConst { id } => format!("l_{id}"),
        VariableKind::LocalArray { id, .. } => format!("l_arr_{id}"),
        VariableKind::SharedArray { id, .. } | VariableKind::Shared { id } => format!("shared_memory_{id}"),
        VariableKind::GlobalInputArray(id) | VariableKind::GlobalOutputArray(id) => format!("buffer_{id}"),
        VariableKind::TensorMapInput(id) | VariableKind::TensorMapOutput(id) => format!("tensor_map_{id}"),
        kind => panic!("{kind:?} has no name in C++"),
    }
}

/// Name of a new local that holds `value`, for any kind of variable.
fn operand(scope: &mut Scope, value: Variable) -> String {
    // Not `create_local_mut`: CubeCL reuses such locals when unreferenced, and a name in a
    // statement is no reference.
    let local = *scope.create_local(value.ty);
    scope.register(Instruction::new(Operation::Copy(value), local));
    name(&local)
}

/// Register constraints of the variable's type, for reads and for writes.
fn constraints(variable: &Variable) -> [&'static str; 2] {
    match (variable.ty.elem_type().is_float(), variable.ty.elem_type().size()) {
        (true, 4) => ["f", "=f"],
        (false, 4) => ["r", "=r"],
        (false, 8) => ["l", "=l"],
        _ => panic!("{} is no operand", variable.ty),
    }
}

/// Value in a register, as an input.
fn input(scope: &mut Scope, value: Variable) -> Operand {
    (constraints(&value)[0], operand(scope, value))
}

/// Local that the statement writes.
fn output(local: &Variable) -> Operand {
    (constraints(local)[1], name(local))
}

/// Array elements in registers.
fn elements(constraint: &'static str, array: &Variable, indices: Range<u32>) -> Vec<Operand> {
    let array = name(array);
    indices.map(|i| (constraint, format!("{array}[{i}]"))).collect()
}

/// Address of an element.
fn element_address(scope: &mut Scope, array: &Variable, index: Variable) -> Operand {
    let index = operand(scope, index);
    ("l", format!("{} + {index}", name(array)))
}

/// Placeholders `%0, %1, ...` of the first `count` operands.
fn places(count: u32) -> String {
    (0..count).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ")
}

/// Adds an `asm volatile` statement.
///
/// `template` is PTX whose operands `%0`, `%1`, ... are first `outputs`, then `inputs`. Memory is
/// clobbered, so that the compiler moves no access across the statement.
fn asm(scope: &mut Scope, template: &str, outputs: &[Operand], inputs: &[Operand]) {
    let (template, operands) = (escape(template), operands(outputs, inputs));
    statement(scope, &format!("asm volatile(\"{template}\" : {operands} : \"memory\");"));
}

/// Adds an `asm` statement whose outputs depend only on its inputs. The compiler may move, merge or
/// drop it.
fn pure_asm(scope: &mut Scope, template: &str, outputs: &[Operand], inputs: &[Operand]) {
    let (template, operands) = (escape(template), operands(outputs, inputs));
    statement(scope, &format!("asm(\"{template}\" : {operands});"));
}

/// Escapes a template for a C++ string.
fn escape(template: &str) -> String {
    template.replace('\n', "\\n")
}

fn operands(outputs: &[Operand], inputs: &[Operand]) -> String {
    let list = |operands: &[Operand]| {
        let operands = operands.iter().map(|(constraint, value)| format!("\"{constraint}\"({value})"));
        operands.collect::<Vec<_>>().join(", ")
    };
    format!("{} : {}", list(outputs), list(inputs))
}
