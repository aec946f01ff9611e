//! A run's FP8 health: a row for each layer, a column for each sampled step, colours for dB.

use plotters::style::RGBColor;
use plotters::style::colors::colormaps::ViridisRGB;

use crate::metrics::thousands;

use super::axis::Axis;
use super::canvas::{Anchor, Canvas, GREY, INK, NORMAL, PALE, SMALL, fitted, width};
use super::error::PlotError;
use super::health::{Health, MAX_FLUSHED, MAX_SATURATED, Quality, db_range};
use super::panel::{Heading, MARGIN, Panel, RIGHT};
use super::source::PlotRun;

/// Rows, columns and cells at most; more are merged.
const MAX_ROWS: usize = 800;
const MAX_COLUMNS: usize = 400;
const MAX_CELLS: usize = 20_000;
/// Units between texts' middles.
const LINE: i32 = SMALL + 4;
/// Units from the cells' right end to that of all: marks, colour bar, its numbers, its title.
const BESIDE: i32 = 330;
const MARK: i32 = 34;
const MARKS: [&str; 3] = ["S", "F", "N"];
const ZERO: RGBColor = RGBColor(0xAA, 0xAA, 0xAA);

/// One for each run that has samples. Colours mean the same in all.
pub(super) fn heat_maps(runs: &[PlotRun]) -> Vec<HeatMap> {
    let range = db_range(runs.iter().map(|run| &run.health));
    let sampled = runs.iter().filter(|run| !run.health.layers.is_empty());
    sampled.enumerate().map(|(i, run)| HeatMap::new(run, range, i == 0)).collect()
}

pub(super) struct HeatMap {
    heading: Heading,
    health: Health,
    bar: Axis,
    left: i32,
    /// The height of a row, in units.
    row: i32,
}

impl HeatMap {
    fn new(run: &PlotRun, (low, high): (f64, f64), is_first: bool) -> Self {
        let merged_rows = run.health.layers.len().div_ceil(MAX_ROWS);
        let rows = run.health.layers.len().div_ceil(merged_rows);
        let merged_columns = run.health.steps.len().div_ceil(MAX_COLUMNS.min(MAX_CELLS / rows));
        let key = format!(
            "Colour: the smallest SQNR of a layer's operands. Grey: all were zero. White: no sample. \
             S, F, N: in some sample an operand had more than {}% of its elements saturated (S), more than {}% flushed to zero (F), \
             or one that was inf or NaN (N).",
            100.0 * MAX_SATURATED,
            100.0 * MAX_FLUSHED
        );
        let mut notes = if is_first { key } else { String::new() };
        let merges = [(merged_rows, "row", "layers"), (merged_columns, "column", "samples")];
        for (merged, one, many) in merges.into_iter().filter(|merge| merge.0 > 1) {
            notes += &format!(" Each {one} is the worst of up to {merged} {many}.");
        }
        let title = format!("FP8 health: {}", run.name);
        let mut health = run.health.merged(merged_rows, merged_columns);
        health.layers.iter_mut().for_each(|name| *name = fitted(name, SMALL, 460));
        let labels = health.layers.iter().map(|name| width(name, SMALL)).max().unwrap_or(0);
        let usual = 760 / health.layers.len() as i32;
        let row = if health.layers.len() <= 40 { usual.clamp(LINE, 48) } else { usual.max(2) };
        Self {
            heading: Heading::new(&title, &notes),
            bar: Axis::linear(low, high, 5),
            left: MARGIN + labels + 16,
            // Whole pixels.
            row: row + row % 2,
            health,
        }
    }

    fn cells_height(&self) -> i32 {
        self.row * self.health.layers.len() as i32
    }

    /// The height of the bar: a single layer's map has room for its numbers too.
    fn bar_height(&self) -> i32 {
        self.cells_height().clamp(240, 760)
    }

    fn color(&self, quality: Quality) -> RGBColor {
        match quality {
            Quality::Zero => ZERO,
            Quality::Db(db) => ViridisRGB::get_color(self.bar.share(db)),
        }
    }

    fn cells(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        let (right, bottom) = (RIGHT - BESIDE, top + self.cells_height());
        let columns = self.health.steps.len();
        let x = |column: usize| self.left + (column * (right - self.left) as usize / columns) as i32;
        let y = |row: usize| top + row as i32 * self.row;
        for (&(row, column), quality) in &self.health.samples {
            // One unit more, which the next one covers: browsers leave seams between edges that meet.
            let end = ((x(column + 1) + 1).min(right), (y(row + 1) + 1).min(bottom));
            canvas.rectangle((x(column), y(row)), end, self.color(*quality))?;
        }
        let frame = [(self.left, top), (right, top), (right, bottom), (self.left, bottom), (self.left, top)];
        canvas.line(frame.to_vec(), GREY.into(), 2)?;
        for (row, name) in self.health.layers.iter().enumerate().step_by(((LINE + self.row - 1) / self.row) as usize) {
            canvas.text(name, (self.left - 10, y(row) + self.row / 2), (SMALL, INK, Anchor::Right))?;
        }
        let labels: Vec<_> = self.health.steps.iter().map(|step| thousands(&step.to_string())).collect();
        let widest = labels.iter().map(|label| width(label, NORMAL)).max().unwrap_or(0) + 30;
        let every = (widest as usize * columns).div_ceil((right - self.left) as usize);
        for (column, label) in labels.iter().enumerate().step_by(every) {
            canvas.text(label, ((x(column) + x(column + 1)) / 2, bottom + 24), (NORMAL, INK, Anchor::Middle))?;
        }
        canvas.text("sampled step", ((self.left + right) / 2, bottom + 58), (NORMAL, INK, Anchor::Middle))
    }

    fn marks(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        for (kind, letter) in (0..).zip(MARKS) {
            let x = RIGHT - BESIDE + 16 + kind * MARK;
            canvas.text(letter, (x + MARK / 2, top - 16), (SMALL, INK, Anchor::Middle))?;
            canvas.rectangle((x + 2, top), (x + MARK - 2, top + self.cells_height()), PALE)?;
            for (row, _) in (0..).zip(&self.health.marks).filter(|(_, marks)| marks[kind as usize]) {
                let y = top + row * self.row;
                canvas.rectangle((x + 2, y), (x + MARK - 2, y + self.row), INK)?;
            }
        }
        Ok(())
    }

    fn color_bar(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        let (left, height) = (RIGHT - BESIDE + 170, self.bar_height());
        let (low, high) = self.bar.ends();
        let levels = 64;
        let y = |share: f64| top + height - (share * f64::from(height)).round() as i32;
        // Each down to the lower end, of which the next ones cover their part.
        for level in (0..levels).rev() {
            let [to, middle] = [1.0, 0.5].map(|part| (f64::from(level) + part) / f64::from(levels));
            let color = self.color(Quality::Db(low + middle * (high - low)));
            canvas.rectangle((left, y(to)), (left + 34, top + height), color)?;
        }
        for (db, label) in &self.bar.ticks {
            let y = y(self.bar.share(*db));
            canvas.line(vec![(left + 34, y), (left + 44, y)], GREY.into(), 2)?;
            canvas.text(label, (left + 52, y), (NORMAL, INK, Anchor::Left))?;
        }
        let widest = self.bar.ticks.iter().map(|tick| width(&tick.1, NORMAL)).max().unwrap_or(0);
        canvas.text("SQNR (dB)", (left + 52 + widest + 36, top + height / 2), (NORMAL, INK, Anchor::Upwards))
    }
}

impl Panel for HeatMap {
    fn height(&self) -> i32 {
        self.heading.height() + 30 + (self.cells_height() + 90).max(self.bar_height() + 30) + 30
    }

    fn draw(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        self.heading.draw(canvas, top)?;
        let top = top + self.heading.height() + 30;
        self.cells(canvas, top)?;
        self.marks(canvas, top)?;
        self.color_bar(canvas, top)
    }
}
