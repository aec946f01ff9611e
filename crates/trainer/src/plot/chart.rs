//! Line charts over steps.

use std::collections::HashMap;
use std::ops::Range;

use plotters::chart::ChartBuilder;
use plotters::element::{Cross, EmptyElement, PathElement};
use plotters::style::{BLACK, Color, TRANSPARENT};

use super::runs::{PlottedRun, Point};
use super::{Area, FONT, PlotPanel, TITLE, color, marker};
use crate::metrics::thousands;

/// Maximum number of points drawn per curve; more are thinned.
const MAX_POINTS: usize = 2000;
/// Runs with at least this number of points are smoothed.
const MANY: usize = 100;
/// Number of markers of a curve.
const MARKERS: usize = 5;

/// Range of an axis.
#[derive(Clone, Copy, PartialEq)]
enum Scale {
    /// The values, without a few large ones.
    Values,
    /// From zero.
    FromZero,
    /// Equally far above and below a line at zero.
    AroundZero,
    /// Whole powers of ten. Curves and axis have logarithms.
    Log,
}

/// Line chart over steps.
pub(super) struct Chart {
    title: String,
    unit: &'static str,
    scale: Scale,
    /// First and last step of all charts.
    steps: Range<f64>,
    y: Range<f64>,
    /// Weight of [`smoothed`]; 0 disables smoothing.
    smoothing: f64,
    /// Finite points of each run.
    curves: Vec<Vec<Point>>,
    /// Step of each run with a loss that is not finite.
    diverged: Vec<Option<f64>>,
}

/// Charts of a panel for which a run has data.
pub(super) fn charts(kind: PlotPanel, runs: &[PlottedRun]) -> Vec<Chart> {
    let plain = |title: &str, unit, scale, of: fn(&PlottedRun) -> &Vec<Point>| {
        (title.to_string(), unit, scale, runs.iter().map(|run| of(run).clone()).collect())
    };
    let less_first = |title: &str, of: fn(&PlottedRun) -> &Vec<Point>| {
        let first: HashMap<_, _> = of(&runs[0]).iter().map(|(step, value)| (step.to_bits(), value)).collect();
        let less = |(step, value): &Point| Some((*step, value - *first.get(&step.to_bits())?));
        let curves = runs.iter().map(|run| of(run).iter().filter_map(less).collect());
        // The first run's own curve would be the line at zero.
        let curves = std::iter::once(vec![]).chain(curves.skip(1)).collect();
        (format!("{title} minus {}", runs[0].name), "nats per token", Scale::AroundZero, curves)
    };
    let charts: Vec<(_, _, _, Vec<Vec<Point>>)> = match kind {
        PlotPanel::Losses => vec![
            plain("Training loss", "nats per token", Scale::Values, |run| &run.loss),
            plain("Validation loss", "nats per token", Scale::Values, |run| &run.held_out),
        ],
        PlotPanel::Difference => {
            vec![less_first("Training loss", |run| &run.loss), less_first("Validation loss", |run| &run.held_out)]
        }
        PlotPanel::Throughput => {
            vec![plain("Throughput", "tokens/s", Scale::FromZero, |run| &run.tokens_per_second)]
        }
        PlotPanel::GradNorm => {
            vec![plain("Gradient norm before clipping", "L2 norm", Scale::Log, |run| &run.grad_norm)]
        }
        PlotPanel::Lr => vec![plain("Learning rate", "rate", Scale::FromZero, |run| &run.lr)],
        PlotPanel::Health => vec![],
    };
    let steps = runs.iter().flat_map(|run| run.loss.iter().chain(&run.held_out)).map(|point| point.0);
    let (first, last) = steps.fold((f64::MAX, 0.0), |(first, last), step| (step.min(first), step.max(last)));
    let charts = charts.into_iter().filter_map(|(title, unit, scale, mut curves)| {
        if scale == Scale::Log {
            curves.iter_mut().for_each(|curve| curve.retain(|point| point.1 > 0.0));
            curves.iter_mut().flatten().for_each(|point| point.1 = point.1.log10());
        }
        Some(Chart {
            y: range(scale, &curves)?,
            steps: first..last.max(first + 1.0),
            smoothing: if kind == PlotPanel::Lr { 0.0 } else { smoothing(curves.iter().map(Vec::len).max()?) },
            diverged: runs.iter().map(|run| run.diverged.map(|step| step as f64)).collect(),
            title,
            unit,
            scale,
            curves,
        })
    });
    charts.collect()
}

impl Chart {
    pub(super) fn draw(&self, area: &Area<'_>) -> anyhow::Result<()> {
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, TITLE)
            .margin(12)
            .margin_right(36)
            .x_label_area_size(60)
            .y_label_area_size(110)
            .build_cartesian_2d(self.steps.clone(), self.y.clone())?;
        let is_log = self.scale == Scale::Log;
        let number = |value: &f64| match value {
            _ if is_log => 10_f64.powf(*value) as f32,
            // A rounding error of zero.
            _ if value.abs() < 1e-9 * self.y.end.abs() => 0.0,
            _ => *value as f32,
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .label_style(FONT)
            .x_labels(6)
            .y_labels(if is_log { (self.y.end - self.y.start) as usize + 1 } else { 7 })
            .x_label_formatter(&|step| if step.fract() == 0.0 { thousands(&step.to_string()) } else { String::new() })
            .y_label_formatter(&|value| number(value).to_string())
            .x_desc("optimizer step")
            .y_desc(self.unit)
            .draw()?;
        if self.scale == Scale::AroundZero {
            chart.draw_series([PathElement::new(
                [(self.steps.start, 0.0), (self.steps.end, 0.0)],
                BLACK.stroke_width(2),
            )])?;
        }
        let clamped = |points: &[Point]| -> Vec<Point> {
            points.iter().map(|&(step, value)| (step, value.clamp(self.y.start, self.y.end))).collect()
        };
        let curves = || self.curves.iter().enumerate().filter(|(_, curve)| !curve.is_empty());
        let mut shown = vec![];
        for (run, curve) in curves() {
            let (mut points, mut opacity) = (clamped(&thinned(curve)), 1.0);
            if self.smoothing > 0.0 {
                chart.draw_series([PathElement::new(points, color(run).mix(0.3))])?;
                (points, opacity) = (clamped(&thinned(&smoothed(curve, self.smoothing))), 0.9);
            }
            shown.push((run, points, opacity));
        }
        for (run, points, opacity) in &shown {
            chart.draw_series([PathElement::new(points.clone(), color(*run).mix(*opacity).stroke_width(3))])?;
        }
        for (run, points, _) in &shown {
            let places = places(points, *run, self.curves.len());
            chart.draw_series(places.map(|place| EmptyElement::at(place) + marker(*run)))?;
        }
        let diverged = self.diverged.iter().enumerate().filter_map(|(run, step)| Some((run, (*step)?)));
        let cross = |(run, step)| Cross::new((step, self.y.end), 9, color(run).stroke_width(4));
        chart.draw_series(diverged.map(cross))?;
        Ok(())
    }
}

/// Places of a curve's markers. Markers of coinciding curves take turns along the common line.
fn places(points: &[Point], run: usize, runs: usize) -> impl Iterator<Item = Point> {
    (0..MARKERS).map(move |i| {
        let share = (i as f64 + (run as f64 + 0.5) / runs as f64) / MARKERS as f64;
        let at = share * (points.len() - 1) as f64;
        let (from, to) = (points[at as usize], points[at.ceil() as usize]);
        let between = |from: f64, to: f64| from + at.fract() * (to - from);
        (between(from.0, to.0), between(from.1, to.1))
    })
}

/// Explains the curves of these runs.
pub(super) fn reading(runs: &[PlottedRun]) -> String {
    let smoothing = smoothing(runs.iter().map(|run| run.loss.len()).max().unwrap_or(0));
    let thick = format!("Thick: exponential moving average, decay {smoothing}. ");
    let thick = if smoothing > 0.0 { &*thick } else { "" };
    format!("{thick}Markers tell coinciding curves apart. Values beyond an axis are drawn at its end.")
}

/// Smoothing weight `w` for at most `n` points: the mean lags `w / (1 - w)` points behind, a
/// fifteenth of the run. 0 for short runs.
fn smoothing(n: usize) -> f64 {
    if n < MANY { 0.0 } else { ((1.0 - 15.0 / n as f64).min(0.9) * 100.0).round() / 100.0 }
}

/// Exponential moving average `m = w m + (1 - w) value` from 0, divided by `1 - w^n` to remove the
/// initial bias.
fn smoothed(points: &[Point], w: f64) -> Vec<Point> {
    let (mut mean, mut weight) = (0.0, 0.0);
    let next = |&(step, value): &Point| {
        (mean, weight) = (w * mean + (1.0 - w) * value, w * weight + (1.0 - w));
        (step, mean / weight)
    };
    points.iter().map(next).collect()
}

/// At most [`MAX_POINTS`] points: the smallest and the largest of each bin, in the order of their
/// steps.
fn thinned(points: &[Point]) -> Vec<Point> {
    let bins = points.chunks((2 * points.len()).div_ceil(MAX_POINTS).max(1));
    let ends = |bin: &[Point]| {
        let by_value = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let [low, high] = [*bin.iter().min_by(by_value)?, *bin.iter().max_by(by_value)?];
        Some(if low.0 <= high.0 { [low, high] } else { [high, low] })
    };
    let mut thinned: Vec<_> = bins.filter_map(ends).flatten().collect();
    thinned.dedup();
    thinned
}

/// Range of an axis that shows most of the curves; `None` without points.
fn range(scale: Scale, curves: &[Vec<Point>]) -> Option<Range<f64>> {
    let size = |value: f64| if scale == Scale::AroundZero { value.abs() } else { value };
    let (low, high) = usual(curves.iter().map(|curve| curve.iter().map(|point| size(point.1)).collect()))?;
    Some(match scale {
        Scale::FromZero => 0.0..if high > 0.0 { 1.08 * high } else { return None },
        Scale::AroundZero if high > 0.0 => -1.05 * high..1.05 * high,
        Scale::AroundZero => -1.0..1.0,
        Scale::Values if high - low > 1e-6 * high.abs() => low - 0.04 * (high - low)..high + 0.04 * (high - low),
        Scale::Values => low - 0.05 * low.abs().max(1.0)..low + 0.05 * low.abs().max(1.0),
        // At most eight decades.
        Scale::Log => low.floor().clamp(high.ceil() - 8.0, high.ceil() - 1.0)..high.ceil(),
    })
}

/// Smallest value, and a high one: neither a long curve's first values nor a run far above the
/// median run, such as a diverged one, set it.
fn usual(curves: impl Iterator<Item = Vec<f64>>) -> Option<(f64, f64)> {
    let (mut lows, mut highs) = (vec![], vec![]);
    for mut values in curves.filter(|values| !values.is_empty()) {
        values.sort_by(f64::total_cmp);
        let [low, most, high] = [0, values.len() * 9 / 10, values.len() - 1].map(|i| values[i]);
        lows.push(low);
        highs.push(if values.len() < MANY { high } else { high.min(most + (most - low)) });
    }
    highs.sort_by(f64::total_cmp);
    let (low, middle) = (lows.into_iter().min_by(f64::total_cmp)?, highs[(highs.len() - 1) / 2]);
    Some((low, highs.into_iter().rfind(|high| *high <= middle + 2.0 * (middle - low)).unwrap_or(middle)))
}
