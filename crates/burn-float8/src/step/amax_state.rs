//! [`AmaxState`]: the history of one cast as checkpoints hold it.
use crate::config::{AmaxComputeAlgo, DelayedScaling};

/// A cast's history on the host; all values by their bits, so that infinities and NaN survive any file format.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmaxState {
    /// Newest first, padded with zeros to the length of the history; empty if no step has ended.
    pub history: Vec<u32>,
    /// What the scale is made of.
    pub scaling_amax: Option<u32>,
    /// The largest amax of the step under way, if it has one; of several, the largest counts.
    pub observed: Vec<u32>,
}

impl AmaxState {
    /// The amax of which the scale of the next cast is made, the step under way being over; none without a step that had one, in which
    /// case the tensor's own counts.
    pub fn next_scaling_amax(&self, scaling: DelayedScaling) -> Option<f32> {
        // By their bits NaN is the largest.
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
