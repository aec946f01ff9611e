//! Variants of attention.

use cubecl_core::ir::StorageType;
use float8_kernels::attention::{
    AttentionInputs, AttentionKernel, AttentionSchedule, HeadsView, attention_backward, attention_forward,
    fix_attention_schedule,
};
use float8_kernels::check::MASK_BYTES;

use super::{Launcher, dtypes};

/// Modes in addition to the causal mask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Modes {
    Causal,
    Documents,
    /// All that the kernel has.
    All,
}

impl Launcher {
    /// Forward and backward of heads of each class of tile, by tensor cores and without; each mode;
    /// and keys in parts.
    pub(super) fn attention(&self) {
        let [f32, f16, bf16] = dtypes();
        for kernel in [AttentionKernel::Wgmma, AttentionKernel::Mma] {
            for widths in [[64; 2], [128; 2], [256; 2], [192, 128]] {
                self.attend(widths, bf16, kernel, Modes::Causal);
            }
            self.attend([64; 2], f16, kernel, Modes::Causal);
            self.attend([128; 2], f16, kernel, Modes::All);
        }
        self.attend([128; 2], bf16, AttentionKernel::Wgmma, Modes::Documents);
        for schedule in [AttentionSchedule::Overlapped, AttentionSchedule::PingPong] {
            fix_attention_schedule(schedule);
            self.attend([128; 2], bf16, AttentionKernel::Wgmma, Modes::Causal);
        }
        fix_attention_schedule(AttentionSchedule::default());
        self.attend([256; 2], f32, AttentionKernel::Tiles, Modes::Causal);
        self.attend([63; 2], f16, AttentionKernel::Tiles, Modes::Causal);
        self.attend([128; 2], f32, AttentionKernel::Tiles, Modes::All);
        self.decode(f16, AttentionKernel::Mma);
        self.decode(f32, AttentionKernel::Tiles);
    }

    /// A query of heads of 128 over a cache.
    fn decode(&self, dtype: StorageType, kernel: AttentionKernel) {
        let view = |heads: usize, positions: usize| {
            let shape = [1, heads, positions, 128];
            let handle = self.memory(heads * positions * 128 * dtype.size());
            HeadsView { handle, shape, strides: [0, positions * 128, 128, 1], dtype }
        };
        let (query, [key, value]) = (view(4, 1), [(); 2].map(|()| view(2, 1024)));
        let (mask, bias, documents, softcap) = (None, None, None, None);
        let (scale, causal) = (0.125, true);
        let inputs = AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, kernel };
        attention_forward(&self.client, &inputs).expect("inputs that fit");
    }

    fn attend(&self, [dim, width]: [usize; 2], dtype: StorageType, kernel: AttentionKernel, modes: Modes) {
        let (heads, kv_heads, positions) = (4, 2, 256);
        let all = modes == Modes::All;
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
            bias: (all && kernel != AttentionKernel::Wgmma).then(|| view(scores, dtype)),
            documents: (modes != Modes::Causal).then(|| self.memory(4 * positions)),
            scale: 0.125,
            softcap: all.then_some(30.0),
            causal: true,
            kernel,
        };
        let output = attention_forward(&self.client, &inputs).expect("inputs that fit");
        let dy = view([1, heads, positions, width], dtype);
        let y = HeadsView { handle: output.y, ..dy.clone() };
        attention_backward(&self.client, &inputs, &y, &output.lse, &dy).expect("inputs that fit");
    }
}
