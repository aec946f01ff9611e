//! Heat map of a run's FP8 health: layers as rows, sampled steps as columns, colours for dB.

use plotters::chart::ChartBuilder;
use plotters::coord::combinators::BindKeyPoints;
use plotters::element::Rectangle;
use plotters::style::colors::colormaps::ViridisRGB;
use plotters::style::{Color, RGBColor, TRANSPARENT};

use crate::metrics::thousands;

use super::Panel;
use super::chart::{BELOW, label};
use super::error::PlotError;
use super::health::{Health, MAX_FLUSHED, MAX_SATURATED, db_range};
use super::look::{Area, GREY, INK, LINE, MARGIN, NORMAL, PALE, RIGHT, SMALL, WIDTH, fitted, letters, width};
use super::source::PlotRun;

/// Maximum number of labelled columns.
const MAX_LABELS: usize = 8;
/// Widths in units: a letter of a layer's name, a mark, the colour bar, its numbers, and gaps.
const LETTER: i32 = 14;
const MARKS: [&str; 3] = ["S", "F", "N"];
const MARK: i32 = 34;
const BAR: i32 = 34;
const NUMBERS: i32 = 110;
const GAP: i32 = 48;
const ZERO: RGBColor = RGBColor(0xAA, 0xAA, 0xAA);

/// One panel per run with samples. All use the same colours.
pub(super) fn panels<'a>(runs: &'a [PlotRun]) -> Vec<Panel<'a>> {
    let range = db_range(runs.iter().map(|run| &run.health));
    let mut key = vec![
        "Colour: the smallest SQNR of a layer's operands. Grey: all were zero. White: no sample.".into(),
        format!(
            "S, F, N: an operand once had more than {}% of its elements saturated, more than {}% flushed to zero, or one that was inf or NaN.",
            100.0 * MAX_SATURATED,
            100.0 * MAX_FLUSHED
        ),
    ];
    let sampled = runs.iter().filter(|run| !run.health.layers.is_empty());
    let panel = |run: &'a PlotRun| {
        // The key is only in the first panel.
        let mut notes = std::mem::take(&mut key);
        let (layers, samples) = run.health.merged;
        for (merged, one, many) in [(layers, "row", "layers"), (samples, "column", "samples")] {
            notes.extend((merged > 1).then(|| format!("Each {one} is the worst of up to {merged} {many}.")));
        }
        let map = HeatMap::new(&run.health, range);
        let height = map.down + BELOW + 30;
        Panel { title: format!("FP8 health: {}", run.name), notes, height, draw: Box::new(move |area| map.draw(area)) }
    };
    sampled.map(panel).collect()
}

struct HeatMap<'a> {
    health: &'a Health,
    /// Range of the colours, in dB.
    range: (f64, f64),
    /// Names of the layers, and their width in units.
    names: Vec<String>,
    names_width: i32,
    /// Height of a row and of all rows, in units.
    row: i32,
    down: i32,
}

impl<'a> HeatMap<'a> {
    fn new(health: &'a Health, range: (f64, f64)) -> Self {
        let names: Vec<_> = health.layers.iter().map(|name| fitted(name, 34)).collect();
        let letters = names.iter().map(|name| width(name) as i32).max().unwrap_or(0);
        let rows = names.len() as i32;
        // Rows have room for all names unless there are too many, and the map for the numbers of
        // the colour bar.
        let row = (760 / rows).clamp(if rows <= 40 { LINE } else { 2 }, 48).max(240 / rows);
        // Rounds up to whole pixels.
        let row = row + row % 2;
        Self { health, range, names, names_width: letters * LETTER + 30, row, down: row * rows }
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let area = area.split_vertically(self.down + BELOW).0;
        let (cells, bar) = area.split_horizontally(WIDTH - RIGHT - NUMBERS - BAR - GAP);
        self.draw_cells(&cells)?;
        self.draw_bar(&bar.split_horizontally(GAP + BAR + NUMBERS).0)
    }

    /// Colour of a value; `None` is zero.
    fn color(&self, db: Option<f64>) -> RGBColor {
        let (low, high) = self.range;
        db.map_or(ZERO, |db| ViridisRGB::get_color(((db - low) / (high - low)).clamp(0.0, 1.0)))
    }

    /// Draws the cells, and marks to their right. Coordinates are units.
    fn draw_cells(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let (Self { health, row, down, .. }, columns) = (self, self.health.steps.len());
        let all = area.dim_in_pixel().0 as i32 - MARGIN - self.names_width;
        let across = all - GAP - MARK * MARKS.len() as i32;
        let x = |column: usize| (column * across as usize / columns) as i32;
        let mark = |kind: usize| across + GAP + MARK * kind as i32;
        let steps = (0..columns).step_by(columns.div_ceil(MAX_LABELS));
        let steps: Vec<_> = steps.map(|i| ((x(i) + x(i + 1)) / 2, thousands(&health.steps[i].to_string()))).collect();
        let marks = MARKS.iter().enumerate().map(|(kind, letter)| (mark(kind) + MARK / 2, (*letter).to_string()));
        let labels: Vec<_> = steps.into_iter().chain(marks).collect();
        let names = self.names.iter().enumerate().step_by((LINE as usize).div_ceil(*row as usize));
        let names: Vec<_> = names.map(|(i, name)| (i as i32 * row + row / 2, name.clone())).collect();
        let places = |labels: &[(i32, String)]| labels.iter().map(|label| label.0).collect();
        let text = |labels: &[(i32, String)], at: &i32| {
            labels.iter().find(|label| label.0 == *at).map_or(String::new(), |label| label.1.clone())
        };
        let mut chart = ChartBuilder::on(area)
            .margin_left(MARGIN)
            .y_label_area_size(self.names_width)
            .x_label_area_size(BELOW)
            .build_cartesian_2d(
                (0..all).with_key_points(places(&labels)),
                (*down..0).with_key_points(places(&names)),
            )?;
        chart
            .configure_mesh()
            .disable_mesh()
            .axis_style(TRANSPARENT)
            .set_all_tick_mark_size(6)
            .x_label_style(letters(NORMAL, INK))
            .y_label_style(letters(SMALL, INK))
            .x_label_formatter(&|at| text(&labels, at))
            .y_label_formatter(&|at| text(&names, at))
            .x_desc("sampled step")
            .draw()?;
        let cell = |(&(i, column), db): (&(usize, usize), &Option<f64>)| {
            // One unit larger, covered by the next cell: browsers leave gaps between adjacent
            // edges.
            let end = ((x(column + 1) + 1).min(across), ((i as i32 + 1) * row + 1).min(*down));
            Rectangle::new([(x(column), i as i32 * row), end], self.color(*db).filled())
        };
        chart.draw_series(health.samples.iter().map(cell))?;
        chart.draw_series([Rectangle::new([(0, 0), (across, *down)], GREY.stroke_width(2))])?;
        for kind in 0..MARKS.len() {
            let bar = |from: i32, to: i32, color: RGBColor| {
                Rectangle::new([(mark(kind) + 2, from), (mark(kind) + MARK - 2, to)], color.filled())
            };
            let marked = (0..).zip(&health.marks).filter(|(_, marks)| marks[kind]);
            chart.draw_series([bar(0, *down, PALE)])?;
            chart.draw_series(marked.map(|(i, _)| bar(i * row, (i + 1) * row, INK)))?;
        }
        Ok(())
    }

    /// Draws the colour bar.
    fn draw_bar(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let (low, high) = self.range;
        let mut chart = ChartBuilder::on(area)
            .margin_left(GAP)
            .margin_bottom(BELOW)
            .right_y_label_area_size(NUMBERS)
            .build_cartesian_2d(0..1, low..high)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .axis_style(GREY.stroke_width(2))
            .set_all_tick_mark_size(6)
            .label_style(letters(NORMAL, INK))
            .y_labels((self.down / 40).min(12) as usize)
            .y_label_formatter(&|db| label(*db, high - low))
            .y_desc("SQNR (dB)")
            .draw()?;
        let levels = 64;
        // Each level reaches to the lower end; lower levels are drawn over it.
        chart.draw_series((0..levels).rev().map(|level| {
            let [to, middle] =
                [1.0, 0.5].map(|part| low + (high - low) * (f64::from(level) + part) / f64::from(levels));
            Rectangle::new([(0, to), (1, low)], self.color(Some(middle)).filled())
        }))?;
        Ok(())
    }
}
