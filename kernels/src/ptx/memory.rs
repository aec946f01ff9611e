//! Loads that overlap, and stores of 16 bytes.
//!
//! To save registers, the compiler moves CubeCL's loads, which it knows to be read-only, down to
//! their first use, where a thread waits for one after the other. Loads by [`load_global`] stay
//! before a [`pin`], and uses of their values stay after it, so all of them are in flight together.

use cubecl::prelude::*;

use super::{asm, constraints, element_address, elements, input, name, operand, places};

/// Loads scalars `to[first..first + N]` from element `index` of `x`, of `N` 32-bit scalars.
#[cube]
pub(crate) fn load_global<T: Scalar, N: Size>(
    x: &Array<Vector<T, N>>,
    index: u32,
    to: &mut Array<T>,
    #[comptime] first: u32,
) {
    intrinsic!(|scope| {
        let width = x.expand.ty.vector_size() as u32;
        let kind = if x.expand.ty.elem_type().is_float() { "f32" } else { "u32" };
        let address = format!("&{}[{}]", name(&x.expand), operand(scope, *index.expand));
        let outputs = elements(constraints(&to.expand)[1], &to.expand, first..first + width);
        let template = match width {
            1 => format!("ld.global.{kind} %0, [%1];"),
            _ => format!("ld.global.v{width}.{kind} {{{}}}, [%{width}];", places(width)),
        };
        asm(scope, &template, &outputs, &[("l", address)]);
    })
}

/// Loads `width` words, 1, 2 or 4, f32 or u32, to `to[first..first + width]` from element `index`
/// of `x`. One load, aligned to its size.
#[cube]
pub(crate) fn load_global_words<T: CubePrimitive, W: Scalar>(
    x: &Array<T>,
    index: u32,
    to: &mut Array<W>,
    #[comptime] first: u32,
    #[comptime] width: u32,
) {
    intrinsic!(|scope| {
        let address = format!("&{}[{}]", name(&x.expand), operand(scope, *index.expand));
        let outputs = elements(constraints(&to.expand)[1], &to.expand, first..first + width);
        let template = match width {
            1 => "ld.global.b32 %0, [%1];\n".into(),
            _ => format!("ld.global.v{width}.b32 {{{}}}, [%{width}];\n", places(width)),
        };
        asm(scope, &template, &outputs, &[("l", address)]);
    })
}

/// Copies 16 bytes of shared memory at `from` to `x` from element `index` on. Both are aligned to
/// 16 bytes.
#[cube]
pub(crate) fn store_from_shared<T: CubePrimitive>(x: &mut Array<T>, index: u32, from: u32) {
    intrinsic!(|scope| {
        let to = element_address(scope, &x.expand, *index.expand);
        let inputs = [to, input(scope, *from.expand)];
        let template = "{ .reg .b32 w<4>;\n\
                        ld.shared.v4.b32 {w0, w1, w2, w3}, [%1];\n\
                        st.global.v4.b32 [%0], {w0, w1, w2, w3}; }\n";
        asm(scope, template, &[], &inputs);
    })
}

ptx! {
    /// Separates loads: the ones before it are issued before the ones after it. All threads of the
    /// warp must call it.
    pub(crate) fn pin() { "bar.warp.sync 0xffffffff;" }
}
