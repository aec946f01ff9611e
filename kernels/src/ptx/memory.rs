//! Loads that overlap.
//!
//! A load of CubeCL's is one of read-only data, which the compiler moves to where it is used, so as to need fewer registers:
//! then a thread waits for each in turn. Loads by [`load_global`] stay before a [`pin`], and what needs a value that was
//! loaded after the pin stays behind it: all of the first are in flight together.

use cubecl::prelude::*;

use super::{asm, name, operand};

/// Scalars `to[first..first + N]` from element `index` of `x`, of `N` scalars of 32 bits.
#[cube]
pub(crate) fn load_global<T: Scalar, N: Size>(
    x: &Array<Vector<T, N>>,
    index: u32,
    to: &mut Array<T>,
    #[comptime] first: u32,
) {
    intrinsic!(|scope| {
        let (width, float) = (x.expand.ty.vector_size(), x.expand.ty.elem_type().is_float());
        let (constraint, kind) = if float { ("=f", "f32") } else { ("=r", "u32") };
        let address = format!("&{}[{}]", name(&x.expand), operand(scope, *index.expand));
        let outputs = (0..width).map(|i| (constraint, format!("{}[{}]", name(&to.expand), first as usize + i)));
        let places = (0..width).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
        let template = match width {
            1 => format!("ld.global.{kind} %0, [%1];"),
            _ => format!("ld.global.v{width}.{kind} {{{places}}}, [%{width}];"),
        };
        asm(scope, &template, &outputs.collect::<Vec<_>>(), &[("l", address)]);
    })
}

/// Words `to[first..first + 4]` from element `index` of `x`, a multiple of 16 bytes.
#[cube]
pub(crate) fn load_global_quad<T: CubePrimitive>(
    x: &Array<T>,
    index: u32,
    to: &mut Array<u32>,
    #[comptime] first: u32,
) {
    intrinsic!(|scope| {
        let address = format!("&{}[{}]", name(&x.expand), operand(scope, *index.expand));
        let outputs: Vec<_> = (0..4).map(|i| ("=r", format!("{}[{}]", name(&to.expand), first + i))).collect();
        asm(scope, "ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n", &outputs, &[("l", address)]);
    })
}

/// Loads before this are issued before those after it; all threads of the warp must come here.
#[cube]
pub(crate) fn pin() {
    intrinsic!(|scope| { asm(scope, "bar.warp.sync 0xffffffff;", &[], &[]) })
}
