//! Plots the `metrics.jsonl` of runs as an SVG.

mod chart;
mod health;
mod runs;

use std::path::Path;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{EmptyElement, PathElement, Polygon};
use plotters::style::{Color, RGBColor, WHITE};

pub use runs::PlotSource;

use crate::atomic;
use chart::Chart;
use health::HeatMap;
use runs::PlottedRun;

/// Kind of a panel, from top to bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotPanel {
    /// Training and validation losses.
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

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A part of the picture at full width: its height, and the function that draws it.
type Panel<'a> = (u32, Box<dyn Fn(&Area<'_>) -> anyhow::Result<()> + 'a>);

const WIDTH: u32 = 1200;
const FONT: (&str, u32) = ("sans-serif", 20);
const TITLE: (&str, u32) = ("sans-serif", 26);

/// Colours of Okabe and Ito for the colour-blind, without yellow.
const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];

fn color(run: usize) -> RGBColor {
    COLORS[run % COLORS.len()]
}

/// Marker of a run, around a point: a disc for the first seven runs, then a triangle, then a square.
fn marker(run: usize) -> Polygon<(i32, i32)> {
    let corners = [16, 3, 4][run / COLORS.len() % 3];
    let corner = |i| {
        let (sin, cos) = (std::f64::consts::TAU * (f64::from(i) + 0.5) / f64::from(corners)).sin_cos();
        ((7.0 * sin).round() as i32, (7.0 * cos).round() as i32)
    };
    Polygon::new((0..corners).map(corner).collect::<Vec<_>>(), color(run).filled())
}

/// Plots runs into one SVG: the panels of these `kinds` (all if empty) for which a run has data. The
/// file is replaced atomically.
///
/// # Errors
/// Runs that cannot be read or have nothing to plot, and a picture that cannot be written.
pub fn plot(runs: &[PlotSource], kinds: &[PlotPanel], out: &Path) -> anyhow::Result<()> {
    let format = out.extension().map_or("a file without an extension".into(), |e| format!(".{}", e.display()));
    ensure!(format.eq_ignore_ascii_case(".svg"), "{}: pictures are written as .svg, not as {format}", out.display());
    let (sources, runs) = (runs, runs::read(runs)?);
    let mut panels: Vec<Panel<'_>> = vec![];
    for kind in PlotPanel::value_variants().iter().filter(|kind| kinds.is_empty() || kinds.contains(kind)) {
        if *kind == PlotPanel::Health {
            let maps: Vec<_> = runs.iter().filter_map(HeatMap::new).collect();
            if !maps.is_empty() {
                panels.push((130, Box::new(health::draw_key)));
            }
            panels.extend(
                maps.into_iter().map(|map| -> Panel<'_> { (map.height(), Box::new(move |area| map.draw(area))) }),
            );
        } else {
            let charts = chart::charts(*kind, &runs);
            if !charts.is_empty() {
                panels.push((340, Box::new(move |area| side_by_side(&charts, area))));
            }
        }
    }
    if panels.is_empty() && kinds.is_empty() {
        let paths: Vec<_> = sources.iter().map(|source| source.path.display().to_string()).collect();
        bail!("no steps in {}", paths.join(", "));
    } else if panels.is_empty() {
        let names: Vec<_> = kinds.iter().map(|kind| kind.name()).collect();
        bail!("none of these runs has data for {}", names.join(", "));
    }
    panels.insert(0, (60 + 28 * runs.len() as u32, Box::new(|area| draw_legend(area, &runs))));
    let mut svg = String::new();
    {
        let height = panels.iter().map(|panel| panel.0).sum();
        let mut below = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        below.fill(&WHITE)?;
        for (height, draw) in &panels {
            let (area, rest) = below.split_vertically(*height);
            draw(&area)?;
            below = rest;
        }
        below.present()?;
    }
    atomic::replace(out, svg.as_bytes()).with_context(|| format!("cannot write {}", out.display()))
}

fn side_by_side(charts: &[Chart], area: &Area<'_>) -> anyhow::Result<()> {
    charts.iter().zip(area.split_evenly((1, charts.len()))).try_for_each(|(chart, area)| chart.draw(&area))
}

/// Draws colours, markers, names and results of the runs.
fn draw_legend(area: &Area<'_>, runs: &[PlottedRun]) -> anyhow::Result<()> {
    let mut chart = ChartBuilder::on(area).caption(chart::reading(runs), FONT).build_cartesian_2d(0..1, 0..1)?;
    for (i, run) in runs.iter().enumerate() {
        let series = chart.draw_series(None::<PathElement<(i32, i32)>>)?.label(run.label());
        let line = move || PathElement::new([(-25, 0), (25, 0)], color(i).stroke_width(3));
        series.legend(move |(x, y)| EmptyElement::at((x + 25, y)) + line() + marker(i));
    }
    let mut labels = chart.configure_series_labels();
    Ok(labels.position(SeriesLabelPosition::UpperLeft).label_font(FONT).legend_area_size(60).draw()?)
}
