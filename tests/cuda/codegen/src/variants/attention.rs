//! Variants of attention.

use cubecl_core::ir::StorageType;
use float8_kernels::attention::{AttentionInputs, HeadsView, attention_backward, attention_forward};
use float8_kernels::check::MASK_BYTES;

use super::{Launcher, dtypes};

impl Launcher {
    /// Forward and backward of heads of each class of tile, by tensor cores and without; each mode;
    /// and keys in parts.
    pub(super) fn attention(&self) {
        let [f32, f16, bf16] = dtypes();
        for widths in [[64; 2], [128; 2], [256; 2], [192, 128]] {
            self.attend(widths, bf16, true, false);
        }
        for (widths, dtype, tensor_cores) in [([64; 2], f16, true), ([256; 2], f32, false), ([63; 2], f16, false)] {
            self.attend(widths, dtype, tensor_cores, false);
        }
        for (dtype, tensor_cores) in [(f16, true), (f32, false)] {
            self.attend([128; 2], dtype, tensor_cores, true);
            self.decode(dtype, tensor_cores);
        }
    }

    /// A query of heads of 128 over a cache.
    fn decode(&self, dtype: StorageType, tensor_cores: bool) {
        let view = |heads: usize, positions: usize| {
            let shape = [1, heads, positions, 128];
            let handle = self.memory(heads * positions * 128 * dtype.size());
            HeadsView { handle, shape, strides: [0, positions * 128, 128, 1], dtype }
        };
        let (query, [key, value]) = (view(4, 1), [(); 2].map(|()| view(2, 1024)));
        let (mask, bias, documents, softcap) = (None, None, None, None);
        let (scale, causal) = (0.125, true);
        let inputs = AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, tensor_cores };
        attention_forward(&self.client, &inputs).expect("inputs that fit");
    }

    /// Causal, with documents, or with all modes.
    fn attend(&self, [dim, width]: [usize; 2], dtype: StorageType, tensor_cores: bool, all: bool) {
        let (heads, kv_heads, positions) = (4, 2, 256);
        let view = |shape: [usize; 4], dtype: StorageType| {
            let [a, b, c, d] = shape;
            let handle = self.memory(a * b * c * d * dtype.size());
            HeadsView { handle, shape, strides: [b * c * d, c * d, d, 1], dtype }
        };
        let scores = [1, heads, positions, positions];
        let inputs = AttentionInputs {
            query: view([1, heads, positions, dim], dtype),
            key: view([1, kv_heads, positions, dim], dtype),
            value: view([1, kv_heads, positions, width], dtype),
            mask: all.then(|| view(scores, MASK_BYTES)),
            bias: all.then(|| view(scores, dtype)),
            documents: all.then(|| self.memory(4 * positions)),
            scale: 0.125,
            softcap: all.then_some(30.0),
            causal: true,
            tensor_cores,
        };
        let output = attention_forward(&self.client, &inputs).expect("inputs that fit");
        let dy = view([1, heads, positions, width], dtype);
        let y = HeadsView { handle: output.y, ..dy.clone() };
        attention_backward(&self.client, &inputs, &y, &output.lse, &dy).expect("inputs that fit");
    }
}
