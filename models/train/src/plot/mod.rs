//! A picture of runs: what their `metrics.jsonl` say, as an SVG.

mod axis;
mod canvas;
mod curves;
mod error;
mod health;
mod heat_map;
mod kind;
mod legend;
mod panel;
mod series;
mod source;

use std::path::Path;

use clap::ValueEnum;

pub use error::PlotError;
pub use kind::PlotPanel;
pub use source::PlotSource;

use crate::files;
use legend::Legend;
use panel::Panel;

/// Units above the first panel.
const TOP: i32 = 24;

/// Draws runs into one SVG, 900 pixels wide: the panels of these `kinds` (none for all) that some run has data for. Whoever reads
/// `out` finds the whole picture or what was there before.
///
/// # Errors
/// Any [`PlotError`] but [`PlotError::EmptyName`].
pub fn plot(runs: &[PlotSource], kinds: &[PlotPanel], out: &Path) -> Result<(), PlotError> {
    if out.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        return Err(PlotError::Extension { path: out.into() });
    }
    let runs = source::read(runs)?;
    let mut panels: Vec<Box<dyn Panel>> = vec![Box::new(Legend::new(&runs))];
    for kind in PlotPanel::value_variants().iter().filter(|kind| kinds.is_empty() || kinds.contains(kind)) {
        match kind {
            PlotPanel::Health => panels.extend(heat_map::heat_maps(&runs).into_iter().map(|map| Box::new(map) as _)),
            _ => panels.extend(curves::panel(*kind, &runs).map(|panel| Box::new(panel) as _)),
        }
    }
    if panels.len() == 1 {
        return Err(PlotError::NoPanels { kinds: kinds.into() });
    }
    let height = TOP + panels.iter().map(|panel| panel.height()).sum::<i32>();
    let svg = canvas::svg(height, |canvas| {
        let mut top = TOP;
        for panel in &panels {
            panel.draw(canvas, top)?;
            top += panel.height();
        }
        Ok(())
    })?;
    files::replace(out, svg.as_bytes()).map_err(|source| PlotError::Write { path: out.into(), source })
}
