//! All-gather of FP8 operands: the codes and scales that each rank has cast of its rows, put together as one cast of all rows would
//! have them.
use burn_backend::tensor::Device;
use float8_kernels::{Granularity, InvScale};
use std::sync::atomic::Ordering::Relaxed;

use super::Sharding;
use crate::backend::{Float8Backend, HostCodes};
use crate::terms::ContractionAxis;

impl Sharding {
    /// The operand of the whole weight from that of this rank's rows, which must have been cast with the scales that the whole has.
    ///
    /// ```text
    /// last axis     [chunk, N] of each rank, one below the other:    [K, N]
    /// leading axis  [N, chunk] of each rank, side by side:           [N, K]
    /// ```
    /// Columns of `shard` beyond the chunk are left out.
    pub(crate) fn gather_operand<B: Float8Backend>(
        &self,
        shard: &B::Operand,
        axis: ContractionAxis,
        device: &Device<B>,
    ) -> B::Operand {
        if let Some(collectives) = self.on_device::<B>(device) {
            let pending = self.start_gather_on_device(&*collectives, shard, axis);
            return pending.and_then(|pending| pending()).unwrap_or_else(|error| self.fail(error));
        }
        let own = B::fp8_read(shard);
        if self.comm.world_size() == 1 && own.dims == self.dims(self.logical[0], axis) {
            return shard.clone();
        }
        let (format, granularity) = (own.format, own.granularity);
        let pieces = Pieces::of(own, axis, self.chunk, self.logical[1]);
        let words = pieces.to_words();
        let len = words.len();
        let all = self.comm.all_gather(&self.name, words).and_then(|pending| pending.wait());
        let all = all.unwrap_or_else(|error| self.fail(error));
        self.float8_gathers.fetch_add(1, Relaxed);
        let ranks: Vec<_> = all.chunks_exact(len.max(1)).map(|words| pieces.from_words(words)).collect();
        let [k, n] = self.logical;
        let dims = self.dims(k, axis);
        let [height, width] = granularity.scale_dims(dims[0], dims[1]);
        let codes = join(ranks.iter().map(|rank| &rank.0[..]), axis, n, k);
        let inv_scales = match pieces.are_scales_alike {
            true => pieces.inv_scales,
            false => {
                // Scales of rows or blocks of rows, in the same order as the codes.
                let (across, along) = if axis == ContractionAxis::Last { (width, height) } else { (height, width) };
                join(ranks.iter().map(|rank| &rank.1[..]), axis, across, along)
            }
        };
        B::fp8_write(HostCodes { codes, dims, format, granularity, inv_scales }, device)
    }

    /// Rows and contraction of the operand of a matrix with `k` rows.
    fn dims(&self, k: usize, axis: ContractionAxis) -> [usize; 2] {
        match axis {
            ContractionAxis::Last => [k, self.logical[1]],
            ContractionAxis::Leading => [self.logical[1], k],
        }
    }
}

/// What a rank has of an operand.
struct Pieces {
    /// Row-major, cropped to the chunk.
    codes: Vec<u8>,
    inv_scales: Vec<InvScale>,
    /// Whether every rank has the same scales, which then stay where they are.
    are_scales_alike: bool,
    /// E8M0 bytes; else the bits of an f32.
    are_scales_bytes: bool,
}

impl Pieces {
    fn of(own: HostCodes, axis: ContractionAxis, chunk: usize, n: usize) -> Self {
        let HostCodes { codes, dims: [_, width], granularity, inv_scales, .. } = own;
        let codes = match axis {
            ContractionAxis::Last => codes[..chunk * n].to_vec(),
            ContractionAxis::Leading if width == chunk => codes,
            ContractionAxis::Leading => codes.chunks_exact(width).flat_map(|row| &row[..chunk]).copied().collect(),
        };
        // A row of the transpose is a column of the weight, of which every rank has a part.
        let are_scales_alike =
            granularity == Granularity::Tensor || (granularity == Granularity::Row && axis == ContractionAxis::Leading);
        Self { codes, inv_scales, are_scales_alike, are_scales_bytes: granularity == Granularity::Block1x32 }
    }

    /// Codes, then scales unless they are alike.
    fn to_words(&self) -> Vec<u32> {
        let mut bytes = self.codes.clone();
        if !self.are_scales_alike && self.are_scales_bytes {
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            let byte = |scale: &InvScale| scale.to_e8m0().expect("scales of blocks of 32 are E8M0");
            bytes.extend(self.inv_scales.iter().map(byte));
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let mut words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if !self.are_scales_alike && !self.are_scales_bytes {
            words.extend(self.inv_scales.iter().map(|scale| scale.get().to_bits()));
        }
        words
    }

    /// The inverse of [`to_words`](Self::to_words) for another rank's words.
    #[allow(clippy::wrong_self_convention)]
    fn from_words(&self, words: &[u32]) -> (Vec<u8>, Vec<InvScale>) {
        let (codes, scales) = words.split_at(self.codes.len().div_ceil(4));
        let bytes = |words: &[u32], len: usize| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_le_bytes()).take(len).collect()
        };
        let inv_scales = match (self.are_scales_alike, self.are_scales_bytes) {
            (true, _) => vec![],
            (_, true) => bytes(scales, self.inv_scales.len()).into_iter().map(InvScale::from_e8m0).collect(),
            _ => scales.iter().map(|bits| InvScale::new(f32::from_bits(*bits))).collect(),
        };
        (bytes(codes, self.codes.len()), inv_scales)
    }
}

/// Parts of a matrix, `across` wide if they lie one below the other and else as high, cropped to `along` the other way.
fn join<'a, T: Copy + 'a>(
    parts: impl Iterator<Item = &'a [T]> + Clone,
    axis: ContractionAxis,
    across: usize,
    along: usize,
) -> Vec<T> {
    match axis {
        ContractionAxis::Last => parts.flatten().copied().take(across * along).collect(),
        ContractionAxis::Leading => {
            let row = |i: usize| {
                let parts = parts.clone();
                parts
                    .flat_map(move |part| &part[i * (part.len() / across)..(i + 1) * (part.len() / across)])
                    .take(along)
            };
            (0..across).flat_map(row).copied().collect()
        }
    }
}
