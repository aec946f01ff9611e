//! `plot`: draws runs as SVG.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::Parser;

use crate::plot::{PlotPanel, PlotSource, plot};

/// Runs and panels to plot.
#[derive(Clone, Debug, Parser)]
pub struct PlotArgs {
    /// SVG to write.
    #[arg(long, value_name = "FILE", default_value = "plot.svg")]
    pub output: PathBuf,
    /// Panels to draw, separated by commas. If absent, all.
    #[arg(long, value_name = "PANELS", value_delimiter = ',')]
    pub panels: Vec<PlotPanel>,
    /// Folder with a metrics.jsonl, or such a file; NAME=PATH sets the name of the run.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<OsString>,
}

impl PlotArgs {
    /// Writes the picture and logs its path to `out`.
    ///
    /// # Errors
    /// Runs that cannot be plotted, and a log that cannot be written.
    pub fn run(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let runs = self.runs.iter().map(|run| PlotSource::parse(run)).collect::<Result<Vec<_>, _>>()?;
        plot(&runs, &self.panels, &self.output)?;
        writeln!(out, "plotted: {}", self.output.display())?;
        Ok(())
    }
}
