//! PTX instructions as `#[cube]` functions, for what CubeCL 0.10 has no operation for.
//!
//! CubeCL prints a comment that holds a newline as `/* content */`, unescaped, so `\n*/ code /*\n` is C++ in the kernel.
//! Operands are named as cubecl-cpp 0.10.0 names them; a name that changed does not compile, and the code-generation test
//! compiles every kernel. Other compilers print comments too, so callers are guarded by a comptime check of the device.

// The parameters of an intrinsic are used only while a kernel is generated.
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

/// A constraint, such as `=r`, and a C++ expression.
type Operand = (&'static str, String);

/// Adds a statement of C++ to the kernel.
fn statement(scope: &mut Scope, code: &str) {
    scope.register(NonSemantic::Comment { content: format!("\n*/ {code} /*\n") });
}

/// What cubecl-cpp calls a variable.
///
/// # Panics
/// For kinds that are no C++ name, such as builtins: pass those through [`operand`].
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

/// The name of a new local that holds `value`, whatever kind of variable that is.
fn operand(scope: &mut Scope, value: Variable) -> String {
    // Not `create_local_mut`: CubeCL reuses those once nothing refers to them, and a name in a statement does not count.
    let local = *scope.create_local(value.ty);
    scope.register(Instruction::new(Operation::Copy(value), local));
    name(&local)
}

/// Constraints of a register of the variable's type, read and written.
fn constraints(variable: &Variable) -> [&'static str; 2] {
    match (variable.ty.elem_type().is_float(), variable.ty.elem_type().size()) {
        (true, 4) => ["f", "=f"],
        (false, 4) => ["r", "=r"],
        (false, 8) => ["l", "=l"],
        _ => panic!("{} is no operand", variable.ty),
    }
}

/// A value in a register.
fn input(scope: &mut Scope, value: Variable) -> Operand {
    (constraints(&value)[0], operand(scope, value))
}

/// A local that the statement writes.
fn output(local: &Variable) -> Operand {
    (constraints(local)[1], name(local))
}

/// Elements of an array in registers.
fn elements(constraint: &'static str, array: &Variable, indices: Range<u32>) -> Vec<Operand> {
    let array = name(array);
    indices.map(|i| (constraint, format!("{array}[{i}]"))).collect()
}

/// The address of an element.
fn element_address(scope: &mut Scope, array: &Variable, index: Variable) -> Operand {
    let index = operand(scope, index);
    ("l", format!("{} + {index}", name(array)))
}

/// The places `%0, %1, ...` of the first `count` operands.
fn places(count: u32) -> String {
    (0..count).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ")
}

/// An `asm volatile` statement.
///
/// `template` is PTX whose operands `%0`, `%1`, ... are first `outputs`, then `inputs`. Memory is clobbered, so that the compiler
/// moves no access across the statement.
fn asm(scope: &mut Scope, template: &str, outputs: &[Operand], inputs: &[Operand]) {
    let (template, operands) = (escape(template), operands(outputs, inputs));
    statement(scope, &format!("asm volatile(\"{template}\" : {operands} : \"memory\");"));
}

/// An `asm` statement whose outputs follow from its inputs alone: the compiler may move, merge or drop it.
fn pure_asm(scope: &mut Scope, template: &str, outputs: &[Operand], inputs: &[Operand]) {
    let (template, operands) = (escape(template), operands(outputs, inputs));
    statement(scope, &format!("asm(\"{template}\" : {operands});"));
}

/// The inside of a C++ string.
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
