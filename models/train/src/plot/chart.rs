//! Line charts over steps, with axes.

use std::ops::Range;

use plotters::chart::ChartBuilder;
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::data::float::FloatPrettyPrinter;
use plotters::element::{Circle, PathElement};
use plotters::style::{Color, TRANSPARENT};

use crate::metrics::thousands;

use super::error::PlotError;
use super::look::{Area, GREY, INK, Look, MARGIN, NORMAL, PALE, RIGHT, letters};
use super::series::{Point, smoothed, thinned};

/// Units for labels at the side and below.
const BESIDE: i32 = 186;
pub(super) const BELOW: i32 = 80;
/// Maximum number of markers of a run; more would overlap.
const MAX_MARKERS: usize = 60;

/// Points of a run. A NaN splits a line.
#[derive(Debug)]
pub(super) struct Curve {
    look: Look,
    pub line: Vec<Point>,
    /// Thin line with markers.
    pub marked: Vec<Point>,
}

impl Curve {
    pub(super) fn new(run: usize, [line, marked]: [Vec<Point>; 2]) -> Self {
        Self { look: Look::of(run), line, marked }
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.line.iter().chain(&self.marked)
    }
}

/// Line chart over steps.
#[derive(Debug)]
pub(super) struct Chart {
    pub unit: &'static str,
    /// Height of the plotting area, in units.
    pub height: i32,
    /// First and last step.
    pub steps: (usize, usize),
    /// Range of the y axis.
    pub y: Range<f64>,
    /// Ticks of a logarithmic axis, including both ends.
    pub ticks: Option<Vec<f64>>,
    /// Weight of [`smoothed`]; 0 disables smoothing.
    pub smoothing: f64,
    pub curves: Vec<Curve>,
}

impl Chart {
    pub(super) fn all_height(&self) -> i32 {
        self.height + BELOW + 30
    }

    /// All values except NaN.
    pub(super) fn values(&self) -> impl Iterator<Item = f64> {
        self.curves.iter().flat_map(Curve::points).map(|point| point.1).filter(|value| !value.is_nan())
    }

    /// Note about values beyond the axis.
    pub(super) fn beyond(&self) -> String {
        match self.values().filter(|value| !(self.y.start..=self.y.end).contains(value)).count() {
            0 => String::new(),
            1 => "1 value beyond the axis is drawn at its end.".into(),
            outside => format!("{outside} values beyond the axis are drawn at its end."),
        }
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> Result<(), PlotError> {
        let area = area.split_vertically(self.height + BELOW).0;
        match &self.ticks {
            None => self.draw_over(&area, self.y.clone()),
            Some(ticks) => self.draw_over(&area, self.y.clone().log_scale().with_key_points(ticks.clone())),
        }
    }

    fn draw_over<Y>(
        &self,
        area: &Area<'_>,
        y: impl AsRangedCoord<CoordDescType = Y, Value = f64>,
    ) -> Result<(), PlotError>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let steps = match self.steps {
            (first, last) if first == last => first.saturating_sub(1)..last.saturating_add(1),
            (first, last) => first..last,
        };
        let mut chart = ChartBuilder::on(area)
            .margin_left(MARGIN)
            .margin_right(RIGHT)
            .y_label_area_size(BESIDE)
            .x_label_area_size(BELOW)
            .build_cartesian_2d(steps.clone(), y)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(PALE)
            .axis_style(GREY.stroke_width(2))
            .set_all_tick_mark_size(6)
            .label_style(letters(NORMAL, INK))
            .x_labels(8)
            .y_labels((self.height / 44) as usize)
            .x_label_formatter(&|step| thousands(&step.to_string()))
            .y_label_formatter(&|value| label(*value, self.y.end - self.y.start))
            .x_desc("optimizer step")
            .y_desc(self.unit)
            .draw()?;
        let at = |&(step, value): &Point| (step, value.clamp(self.y.start, self.y.end));
        let mut lines = |points: &[Point], look: Look, opacity: f64, width: u32| -> Result<(), PlotError> {
            let color = look.color.mix(opacity);
            for line in thinned(points).split(|point| point.1.is_nan()).filter(|line| !line.is_empty()) {
                match line {
                    [alone] => chart.draw_series([Circle::new(at(alone), width + 3, color.filled())])?,
                    _ => chart.draw_series([PathElement::new(
                        line.iter().map(at).collect::<Vec<_>>(),
                        color.stroke_width(width),
                    )])?,
                };
            }
            Ok(())
        };
        let (opacity, width) = if self.smoothing > 0.0 { (0.3, 2) } else { (0.9, 3) };
        self.curves.iter().try_for_each(|curve| lines(&curve.line, curve.look, opacity, width))?;
        if self.smoothing > 0.0 {
            let mut smooth = |curve: &Curve| lines(&smoothed(&curve.line, self.smoothing), curve.look, 1.0, 4);
            self.curves.iter().try_for_each(&mut smooth)?;
        }
        self.curves.iter().try_for_each(|curve| lines(&curve.marked, curve.look, 0.8, 2))?;
        let plain = chart.plotting_area().strip_coord_spec();
        let (left, top) = plain.get_base_pixel();
        let place = |point: &Point| {
            let (x, y) = chart.plotting_area().map_coordinate(&at(point));
            (x - left, y - top)
        };
        for curve in &self.curves {
            let marked = thinned(&curve.marked);
            let numbers: Vec<_> = marked.iter().filter(|point| !point.1.is_nan()).collect();
            let every = numbers.len().div_ceil(MAX_MARKERS).max(1);
            // Counted from the end, so that the last one is always drawn.
            numbers.iter().rev().step_by(every).try_for_each(|point| plain.draw(&curve.look.marker(place(point))))?;
            let mut lost: Vec<_> = curve.points().filter(|point| point.1.is_nan()).map(|point| point.0).collect();
            lost.sort_unstable();
            let mut crosses: Vec<_> = lost.into_iter().map(|step| place(&(step, self.y.end)).0).collect();
            // Too close crosses would overlap.
            crosses.dedup_by(|x, kept| *x - *kept < 16);
            let mut strokes = crosses.into_iter().flat_map(|x| curve.look.cross((x, 12)));
            strokes.try_for_each(|stroke| plain.draw(&stroke))?;
        }
        Ok(())
    }
}

/// Ticks from one below `low` to one above `high`, both positive: powers of ten, and their
/// multiples by 2 and 5 if there is room. Plotters' ticks are only powers of ten, and there may be
/// none.
pub(super) fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let within = |mantissas: &[f64]| {
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let all: Vec<_> = (first - 1..=last + 1)
            .flat_map(|power| mantissas.iter().map(move |mantissa| mantissa * 10_f64.powi(power)))
            .collect();
        let from = all.iter().rposition(|tick| *tick < low).unwrap_or(0);
        let to = all.iter().position(|tick| *tick > high).unwrap_or(all.len() - 1);
        all[from..=to].to_vec()
    };
    let ticks = within(&[1.0, 2.0, 5.0]);
    if ticks.len() > 7 { within(&[1.0]) } else { ticks }
}

/// Label of a tick on an axis of this length. Rounding errors of zero are written as 0.
pub(super) fn label(value: f64, length: f64) -> String {
    let size = value.abs();
    if size < 1e-9 * length {
        return "0".into();
    }
    let is_plain = (1e-3..1e7).contains(&size);
    let text = FloatPrettyPrinter { allow_scientific: !is_plain, min_decimal: 0, max_decimal: 5 }.print(size);
    format!("{}{}", if value < 0.0 { "-" } else { "" }, if is_plain { thousands(&text) } else { text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        let labels =
            |low, high| log_ticks(low, high).into_iter().map(|tick| label(tick, tick)).collect::<Vec<_>>().join(" ");
        assert_eq!(labels(0.3, 5.0), "0.2 0.5 1 2 5 10");
        assert_eq!(labels(1.0, 1.0), "0.5 1 2");
        assert_eq!(labels(3e-4, 2e3), "1e-4 0.001 0.01 0.1 1 10 100 1,000 10,000");
        let numbers = [0.0, 1e-17, 2.2, -0.05, 2e-6, 20_000.0, 1.5e7, 0.1 + 0.2];
        let expected = ["0", "0", "2.2", "-0.05", "2e-6", "20,000", "1.5e7", "0.3"];
        assert_eq!(numbers.map(|number| label(number, 1.0)), expected);
    }
}
