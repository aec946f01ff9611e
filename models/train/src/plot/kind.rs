//! [`PlotPanel`]: the kinds of panels, from top to bottom.

use clap::ValueEnum;

/// What a panel of the picture shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotPanel {
    /// Training and held-out losses.
    Losses,
    /// Losses of each run less those of the first run at the same step.
    Difference,
    /// Tokens per second.
    Throughput,
    /// Gradient norms.
    GradNorm,
    /// Learning rates.
    Lr,
    /// FP8 statistics by layer and sampled step, a heat map for each run.
    Health,
}

impl PlotPanel {
    /// As the command line has it.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().into())
    }
}
