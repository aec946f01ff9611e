//! [`AmaxState`]: amax history of one cast, for checkpoints.
use crate::config::{AmaxComputeAlgo, DelayedScaling};

/// Amax history of a cast on the host. Values are stored as bits, so that infinities and NaN
/// survive any file format.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmaxState {
    /// Newest first, padded with zeros to the length of the history. Empty if no step has ended.
    pub history: Vec<u32>,
    /// Amax that sets the scale.
    pub scaling_amax: Option<u32>,
    /// Amaxes of the current step, if any. The largest counts.
    pub observed: Vec<u32>,
}

impl AmaxState {
    /// Amax for the scale of the next cast, assuming that the current step ends. None if no step
    /// had an amax: the tensor's own amax is used then.
    pub fn next_scaling_amax(&self, scaling: DelayedScaling) -> Option<f32> {
        // Compared by bits, NaN is the largest.
        let observed = self.observed.iter().copied().max().map(f32::from_bits);
        match (observed.filter(|amax| 0.0 < *amax && *amax <= f32::MAX), self.scaling_amax) {
            (Some(observed), _) => {
                let older = self.history.iter().take(scaling.amax_history_len - 1).copied().map(f32::from_bits);
                let chosen = match scaling.amax_compute_algo {
                    AmaxComputeAlgo::Max => older.fold(observed, f32::max),
                    AmaxComputeAlgo::MostRecent => observed,
                };
                Some((chosen * 2f32.powi(scaling.margin)).clamp(f32::MIN_POSITIVE, f32::MAX))
            }
            (None, before) => before.map(f32::from_bits),
        }
    }
}
