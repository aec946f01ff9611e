//! All-gather of FP8 operands: the codes and scales of each rank's rows are joined into the operand
//! of the whole matrix.
use crate::comm::Pending;
use burn_backend::tensor::Device;
use burn_float8::backend::{Float8Backend, HostCodes};
use float8_kernels::{Format, Granularity, InvScale};
use std::sync::atomic::Ordering::Relaxed;

use crate::collectives::{PendingOnDevice, ShardedAxis, Shards};
use crate::sharding::Sharding;
use crate::wire::{to_bytes, to_words};

impl<B: Float8Backend> Sharding<B> {
    /// Starts to gather the operand of the whole weight from this rank's operand. Its rows must
    /// have been cast with the scales of the whole weight.
    ///
    /// ```text
    /// rows          [chunk, N] of each rank, one below the other:    [K, N]
    /// contraction   [N, chunk] of each rank, side by side:           [N, K]
    /// ```
    /// Columns of `shard` beyond the chunk are dropped.
    pub(crate) fn start_gather(&self, shard: &B::Operand, axis: ShardedAxis, device: &Device<B>) -> Gathering<B> {
        if let Some(collectives) = self.world.shard.on_device(device) {
            let shards = Shards { axis, chunk: self.chunk, len: self.logical[0] };
            let pending = collectives.start_gather(&self.name, shard, shards);
            self.float8_gathers.fetch_add(1, Relaxed);
            return Gathering::OnDevice(pending.unwrap_or_else(|error| self.fail(error)));
        }
        let own = B::fp8_read(shard);
        if self.ranks() == 1 && own.dims == self.dims(self.logical[0], axis) {
            return Gathering::Whole(shard.clone());
        }
        let own = Pieces::of(own, axis, self.chunk, self.logical[1]);
        let all = self.world.shard.comm.all_gather(&self.name, own.to_words()).unwrap_or_else(|error| self.fail(error));
        self.float8_gathers.fetch_add(1, Relaxed);
        Gathering::Words { own, all }
    }

    /// Waits for the gather of [`start_gather`](Self::start_gather) and joins the operand.
    pub(crate) fn finish_gather(&self, gathering: Gathering<B>, device: &Device<B>) -> B::Operand {
        let (own, all) = match gathering {
            Gathering::Whole(operand) => return operand,
            Gathering::OnDevice(pending) => return pending().unwrap_or_else(|error| self.fail(error)),
            Gathering::Words { own, all } => (own, all),
        };
        let all = all.wait().unwrap_or_else(|error| self.fail(error));
        let words = all.len() / self.ranks();
        let ranks: Vec<_> = all.chunks_exact(words.max(1)).map(|words| own.from_words(words)).collect();
        let Pieces { axis, format, granularity, transposed, .. } = own;
        let [k, n] = self.logical;
        let dims = self.dims(k, axis);
        let [height, width] = granularity.scale_dims(dims[0], dims[1]);
        let codes = join(ranks.iter().map(|rank| &rank.0[..]), axis, n, k);
        let inv_scales = match own.shares_scales() {
            true => own.inv_scales,
            false => {
                // Scales of rows or blocks of rows, in the order of the codes.
                let (across, along) = if axis == ShardedAxis::Rows { (width, height) } else { (height, width) };
                join(ranks.iter().map(|rank| &rank.1[..]), axis, across, along)
            }
        };
        B::fp8_write(HostCodes { codes, dims, format, granularity, inv_scales, transposed }, device)
    }

    /// Rows and contraction length of the operand of a matrix with `k` rows.
    fn dims(&self, k: usize, axis: ShardedAxis) -> [usize; 2] {
        match axis {
            ShardedAxis::Rows => [k, self.logical[1]],
            ShardedAxis::Contraction => [self.logical[1], k],
        }
    }
}

/// Operand whose gather is in flight.
pub(crate) enum Gathering<B: Float8Backend> {
    Whole(B::Operand),
    /// In device memory.
    OnDevice(PendingOnDevice<B::Operand>),
    Words {
        own: Pieces,
        all: Pending<Vec<u32>>,
    },
}

/// This rank's part of an operand.
pub(crate) struct Pieces {
    /// Row-major, cropped to the chunk.
    codes: Vec<u8>,
    inv_scales: Vec<InvScale>,
    axis: ShardedAxis,
    format: Format,
    granularity: Granularity,
    transposed: bool,
}

impl Pieces {
    fn of(own: HostCodes, axis: ShardedAxis, chunk: usize, n: usize) -> Self {
        let HostCodes { codes, dims: [_, width], format, granularity, inv_scales, transposed } = own;
        let codes = match axis {
            ShardedAxis::Rows => codes[..chunk * n].to_vec(),
            ShardedAxis::Contraction if width == chunk => codes,
            ShardedAxis::Contraction => codes.chunks_exact(width).flat_map(|row| &row[..chunk]).copied().collect(),
        };
        Self { codes, inv_scales, axis, format, granularity, transposed }
    }

    /// Whether ranks exchange only codes.
    fn shares_scales(&self) -> bool {
        self.axis.shares_scales(self.granularity)
    }

    /// Whether scales are E8M0 bytes instead of f32 bits.
    fn are_scales_bytes(&self) -> bool {
        self.granularity == Granularity::Block1x32
    }

    /// Codes, then scales unless every rank has the same.
    fn to_words(&self) -> Vec<u32> {
        let mut words = to_words(self.codes.clone());
        let byte = |scale: &InvScale| scale.to_e8m0().expect("scales of blocks of 32 are E8M0");
        match (self.shares_scales(), self.are_scales_bytes()) {
            (true, _) => {}
            (_, true) => words.extend(to_words(self.inv_scales.iter().map(byte).collect())),
            _ => words.extend(self.inv_scales.iter().map(|scale| scale.get().to_bits())),
        }
        words
    }

    /// Inverse of [`to_words`](Self::to_words), for another rank's words.
    #[allow(clippy::wrong_self_convention)]
    fn from_words(&self, words: &[u32]) -> (Vec<u8>, Vec<InvScale>) {
        let (codes, scales) = words.split_at(self.codes.len().div_ceil(4));
        let inv_scales = match (self.shares_scales(), self.are_scales_bytes()) {
            (true, _) => vec![],
            (_, true) => to_bytes(scales, self.inv_scales.len()).map(InvScale::from_e8m0).collect(),
            _ => scales.iter().map(|bits| InvScale::new(f32::from_bits(*bits))).collect(),
        };
        (to_bytes(codes, self.codes.len()).collect(), inv_scales)
    }
}

/// Joins parts of a matrix: stacked parts of width `across`, or side-by-side parts of height
/// `across`. The joined axis is cropped to `along`.
fn join<'a, T: Copy + 'a>(
    parts: impl Iterator<Item = &'a [T]> + Clone,
    axis: ShardedAxis,
    across: usize,
    along: usize,
) -> Vec<T> {
    match axis {
        ShardedAxis::Rows => parts.flatten().copied().take(across * along).collect(),
        ShardedAxis::Contraction => {
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
