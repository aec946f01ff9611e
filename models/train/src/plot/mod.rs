//! Plots the `metrics.jsonl` of runs as an SVG.

mod chart;
mod curves;
mod error;
mod health;
mod heat_map;
mod kind;
mod legend;
mod look;
mod series;
mod source;

use std::path::Path;

use clap::ValueEnum;
use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::style::WHITE;

pub use error::PlotError;
pub use kind::PlotPanel;
pub use source::PlotSource;

use crate::atomic;
use look::{Area, GREY, INK, LARGE, LINE, MARGIN, SMALL, WIDTH, fitted, letters};

/// Height of a title in units.
const TITLE: i32 = 64;

/// Function that draws into an area.
type Draw<'a> = Box<dyn Fn(&Area<'_>) -> Result<(), PlotError> + 'a>;

/// Part of the picture, at full width: a title, notes for reading it, and a drawing.
struct Panel<'a> {
    title: String,
    notes: Vec<String>,
    /// Height of the drawing, in units.
    height: i32,
    draw: Draw<'a>,
}

impl Panel<'_> {
    fn heading(&self) -> i32 {
        TITLE + LINE * self.notes.len() as i32
    }
}

/// Plots runs into one SVG, 900 pixels wide: the panels of these `kinds` (all if empty) for which a
/// run has data. The file is replaced atomically.
///
/// # Errors
/// Any [`PlotError`] except [`PlotError::EmptyName`].
pub fn plot(runs: &[PlotSource], kinds: &[PlotPanel], out: &Path) -> Result<(), PlotError> {
    if out.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("svg")) {
        return Err(PlotError::Extension { path: out.into() });
    }
    let runs = source::read(runs)?;
    let mut panels = vec![legend::panel(&runs)];
    for kind in PlotPanel::value_variants().iter().filter(|kind| kinds.is_empty() || kinds.contains(kind)) {
        match kind {
            PlotPanel::Health => panels.extend(heat_map::panels(&runs)),
            _ => panels.extend(curves::panel(*kind, &runs)),
        }
    }
    if panels.len() == 1 {
        return Err(PlotError::NoPanels { kinds: kinds.into() });
    }
    let svg = svg(&panels)?;
    atomic::replace(out, svg.as_bytes()).map_err(|source| PlotError::Write { path: out.into(), source })
}

fn svg(panels: &[Panel<'_>]) -> Result<String, PlotError> {
    let height = MARGIN + panels.iter().map(|panel| panel.heading() + panel.height).sum::<i32>();
    let mut svg = String::new();
    {
        let picture = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        picture.fill(&WHITE)?;
        let mut below = picture.split_vertically(MARGIN).1;
        for panel in panels {
            below.draw_text(&fitted(&panel.title, 90), &letters(LARGE, INK), (MARGIN, LARGE / 2))?;
            for (line, note) in (0..).zip(&panel.notes) {
                below.draw_text(note, &letters(SMALL, GREY), (MARGIN, TITLE + LINE * line))?;
            }
            let (area, rest) = below.split_vertically(panel.heading()).1.split_vertically(panel.height);
            (panel.draw)(&area)?;
            below = rest;
        }
        picture.present()?;
    }
    let size = |scale: i32| format!("width=\"{}\" height=\"{}\"", WIDTH / scale, height / scale);
    Ok(svg.replacen(&size(1), &size(2), 1))
}
