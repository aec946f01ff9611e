//! Shared memory by address, in bytes of the shared window.

use cubecl::ir::{Scope, Variable};
use cubecl::prelude::*;

use super::{Operand, asm, elements, input, name, places, statement};

/// Address of the start of `memory`. The kernel must also use the memory otherwise, because CubeCL
/// allocates none for a name in a statement.
#[cube]
pub(crate) fn shared_address(memory: &SharedMemory<u32>) -> u32 {
    intrinsic!(|scope| {
        let out = scope.create_local_mut(u32::as_type(scope));
        let memory = name(&memory.expand);
        statement(scope, &format!("{} = static_cast<uint32>(__cvta_generic_to_shared({memory}));", name(&out)));
        out.into()
    })
}

ptx! {
    /// The same address, from which the compiler derives nothing earlier. In a loop it would
    /// otherwise keep each address that it derives in registers.
    pub(crate) fn fresh_address(address: u32) -> u32 { "mov.b32 {out}, {address};\n" }

    /// Word of shared memory at a multiple of 4.
    pub(crate) fn load_shared(address: u32) -> f32 { "ld.shared.f32 {out}, [{address}];\n" }

    /// Writes a word to shared memory at a multiple of 4.
    pub(crate) fn store_shared(address: u32, value: f32) { "st.shared.f32 [{address}], {value};\n" }

    /// Writes two words to shared memory at a multiple of 8.
    pub(crate) fn store_shared_pair(address: u32, first: f32, second: f32) {
        "st.shared.v2.f32 [{address}], {{{first}, {second}}};\n"
    }
}

/// Reads `width` words of shared memory, 2 or 4, at `offset` bytes past `address` into `words` from
/// `first` on. The address is aligned to the size of the read.
#[cube]
pub(crate) fn load_shared_words(
    words: &mut Array<f32>,
    #[comptime] first: u32,
    address: u32,
    #[comptime] offset: u32,
    #[comptime] width: u32,
) {
    intrinsic!(|scope| {
        let (outputs, address) = (elements("=f", &words.expand, first..first + width), input(scope, *address.expand));
        let template = format!("ld.shared.v{width}.f32 {{{}}}, [%{width}+{offset}];\n", places(width));
        asm(scope, &template, &outputs, &[address]);
    })
}

/// Writes the first four of `words` to shared memory at a multiple of 16.
#[cube]
pub(crate) fn store_shared_quad(address: u32, words: &Array<u32>) {
    intrinsic!(|scope| {
        let inputs = address_and_quad(scope, *address.expand, &words.expand);
        asm(scope, "st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n", &[], &inputs);
    })
}

/// Writes four 8 by 8 matrices of 16-bit elements to shared memory. Lane `l` supplies the address
/// of row `l mod 8` of matrix `l / 8`. `words[i]` has columns `2 (l mod 4)` and the next of row
/// `l / 4` of matrix `i`.
#[cube]
pub(crate) fn stmatrix_x4(address: u32, words: &Array<u32>) {
    intrinsic!(|scope| {
        let inputs = address_and_quad(scope, *address.expand, &words.expand);
        asm(scope, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n", &[], &inputs);
    })
}

/// Address and first four words of an array, as inputs.
fn address_and_quad(scope: &mut Scope, address: Variable, words: &Variable) -> Vec<Operand> {
    [input(scope, address)].into_iter().chain(elements("r", words, 0..4)).collect()
}
