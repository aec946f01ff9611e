//! Heat map of a run's FP8 health: layers as rows, sampled steps as columns, colours for dB.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use plotters::chart::ChartBuilder;
use plotters::coord::ranged1d::{IntoSegmentedCoord, SegmentValue};
use plotters::element::{EmptyElement, Rectangle, Text};
use plotters::style::colors::colormaps::ViridisRGB;
use plotters::style::colors::full_palette::GREY;
use plotters::style::{Color, RGBColor};

use super::runs::PlottedRun;
use super::{Area, FONT, TITLE};
use crate::metrics::thousands;

/// Range of the colours in dB, the same in all pictures. E4M3 of usual tensors has about 30.
const DB: Range<f64> = 10.0..40.0;
/// Thresholds, as fractions of an operand's elements, beyond which its layer is marked.
const MAX_SATURATED: f64 = 0.001;
const MAX_FLUSHED: f64 = 0.01;
/// Maximum numbers of rows and of columns; more layers and samples share them.
const MAX_ROWS: usize = 400;
const MAX_COLUMNS: usize = 100;

/// Samples of a run.
pub(super) struct HeatMap {
    title: String,
    /// First layer of each row, and its marks: S, F, N.
    rows: Vec<(String, [bool; 3])>,
    /// First sampled step of each column.
    steps: Vec<usize>,
    /// Smallest SQNR of an operand in dB, by row and column; `None` if all operands were zero.
    cells: BTreeMap<(usize, usize), Option<f64>>,
}

impl HeatMap {
    /// Map of a run, if it has samples.
    pub(super) fn new(run: &PlottedRun) -> Option<Self> {
        let samples = || {
            let layers =
                run.records.iter().flat_map(|record| record.health.iter().map(move |layer| (record.step, layer)));
            layers.flat_map(|(line, (name, operands))| {
                // A sample without a step has the step of its line.
                operands
                    .values()
                    .map(move |operand| (name, if operand.step > 0 { operand.step } else { line }, operand))
            })
        };
        let layers: BTreeMap<_, _> = samples().map(|(name, ..)| (natural(name), name)).collect();
        let steps: Vec<_> = samples().map(|(_, step, _)| step).collect::<BTreeSet<_>>().into_iter().collect();
        if layers.is_empty() {
            return None;
        }
        let (in_row, in_column) = (layers.len().div_ceil(MAX_ROWS), steps.len().div_ceil(MAX_COLUMNS));
        let mut rows: Vec<_> = layers.values().step_by(in_row).map(|name| ((*name).clone(), [false; 3])).collect();
        let row_of: BTreeMap<_, _> = layers.into_values().enumerate().map(|(i, name)| (name, i / in_row)).collect();
        let mut cells = BTreeMap::<_, Option<f64>>::new();
        for (name, step, operand) in samples() {
            let (row, column) = (row_of[name], (steps.partition_point(|first| *first <= step) - 1) / in_column);
            let db = operand.sqnr_db.filter(|db| !db.is_nan());
            let worst = cells.entry((row, column)).or_default();
            *worst = [*worst, db].into_iter().flatten().min_by(f64::total_cmp);
            let now = [operand.saturated > MAX_SATURATED, operand.flushed > MAX_FLUSHED, operand.non_finite > 0];
            (0..3).for_each(|kind| rows[row].1[kind] |= now[kind]);
        }
        let shared = [(in_row, "layers a row"), (in_column, "samples a column")].into_iter().filter(|(n, _)| *n > 1);
        let shared: String = shared.map(|(n, what)| format!(", the worst of {n} {what}")).collect();
        let title = format!("FP8 health: {}{shared}", run.name);
        Some(Self { title, rows, steps: steps.into_iter().step_by(in_column).collect(), cells })
    }

    pub(super) fn height(&self) -> u32 {
        150 + (24 * self.rows.len() as u32).min(900)
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> anyhow::Result<()> {
        let (rows, columns) = (self.rows.len(), self.steps.len());
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, TITLE)
            .margin(12)
            .margin_right(70)
            .x_label_area_size(60)
            .y_label_area_size(360)
            .build_cartesian_2d((0..columns - 1).into_segmented(), (0..rows - 1).into_segmented())?;
        let name = |row: &SegmentValue<usize>| match row {
            SegmentValue::CenterOf(up) => self.rows[rows - 1 - up].0.clone(),
            _ => String::new(),
        };
        let step = |column: &SegmentValue<usize>| match column {
            SegmentValue::CenterOf(column) => thousands(&self.steps[*column].to_string()),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .disable_mesh()
            .label_style(FONT)
            .x_labels(8)
            .y_labels(rows.min(37))
            .x_label_formatter(&step)
            .y_label_formatter(&name)
            .x_desc("sampled step")
            .draw()?;
        let edge = |i, end| if i == end { SegmentValue::Last } else { SegmentValue::Exact(i) };
        chart.draw_series(self.cells.iter().map(|((row, column), db)| {
            let up = rows - 1 - row;
            let ends = [(edge(*column, columns), edge(up, rows)), (edge(column + 1, columns), edge(up + 1, rows))];
            Rectangle::new(ends, db.map_or(GREY, heat).filled())
        }))?;
        // Beside a row, also if there is no room for its name.
        let marked = self.rows.iter().rev().enumerate().filter(|(_, (_, marks))| marks.contains(&true));
        chart.draw_series(marked.map(|(up, (_, marks))| {
            let letters = ["S ", "F ", "N "].iter().zip(marks).filter(|mark| *mark.1).map(|mark| *mark.0);
            let place = (SegmentValue::Last, SegmentValue::CenterOf(up));
            EmptyElement::at(place) + Text::new(letters.collect::<String>(), (8, -8), FONT)
        }))?;
        Ok(())
    }
}

fn heat(db: f64) -> RGBColor {
    ViridisRGB::get_color(((db - DB.start) / (DB.end - DB.start)).clamp(0.0, 1.0))
}

/// Draws the colours and explains the marks.
pub(super) fn draw_key(area: &Area<'_>) -> anyhow::Result<()> {
    let key = format!(
        "Smallest SQNR of a layer's operands; grey: all zero. S, F, N: an operand had over {} % saturated, over {} % flushed to zero, any inf or NaN",
        100.0 * MAX_SATURATED,
        100.0 * MAX_FLUSHED
    );
    let mut chart = ChartBuilder::on(area)
        .caption(key, ("sans-serif", 17))
        .margin(24)
        .margin_bottom(0)
        .x_label_area_size(55)
        .build_cartesian_2d(DB, 0..1)?;
    chart.configure_mesh().disable_mesh().label_style(FONT).x_desc("SQNR (dB)").draw()?;
    let levels = (0..60).map(|i| DB.start + f64::from(i) / 2.0);
    chart.draw_series(levels.map(|db| Rectangle::new([(db, 0), (db + 0.5, 1)], heat(db + 0.25).filled())))?;
    Ok(())
}

/// Sort key that orders `layers.10` after `layers.2`.
fn natural(name: &str) -> Vec<(Option<u64>, &str)> {
    name.split('.').map(|part| (part.parse().ok(), part)).collect()
}
