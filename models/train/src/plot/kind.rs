//! [`PlotPanel`]: kinds of panels, from top to bottom.

use clap::ValueEnum;

/// Kind of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotPanel {
    /// Training and held-out losses.
    Losses,
    /// Losses of each run minus the first run's at the same step.
    Difference,
    /// Tokens per second.
    Throughput,
    /// Gradient norms.
    GradNorm,
    /// Learning rates.
    Lr,
    /// FP8 statistics by layer and sampled step, one heat map per run.
    Health,
}

impl PlotPanel {
    /// Name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().into())
    }
}
