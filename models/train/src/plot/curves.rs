//! The panels of curves: losses, their differences, throughput, gradient norms, learning rates.

use std::collections::BTreeMap;

use super::axis::Axis;
use super::canvas::Look;
use super::kind::PlotPanel;
use super::panel::{Curve, CurvePanel, Heading};
use super::series::{MANY, Point, padded, quantile, smoothed, thinned, usual_range};
use super::source::{PlotRun, weight};

/// Ticks of the axis of steps, about.
const STEP_TICKS: usize = 7;

/// The panel of this kind, if some run has data for it. Health is a heat map, not curves.
pub(super) fn panel(kind: PlotPanel, runs: &[PlotRun]) -> Option<CurvePanel> {
    match kind {
        PlotPanel::Losses => loss(runs),
        PlotPanel::Difference => difference(runs),
        PlotPanel::Throughput => throughput(runs),
        PlotPanel::GradNorm => grad_norm(runs),
        PlotPanel::Lr => learning_rate(runs),
        PlotPanel::Health => None,
    }
}

/// The axis of steps, one for all panels, so that what happened at a step is below each other.
fn steps(runs: &[PlotRun]) -> Axis {
    let all = || runs.iter().flat_map(|run| run.loss.iter().chain(&run.held_out)).map(|point| point.0);
    let low = all().min_by(f64::total_cmp).unwrap_or_default();
    let high = all().max_by(f64::total_cmp).unwrap_or_default();
    Axis::steps(low, high, STEP_TICKS)
}

/// The curve of run `run`, and its mean by [`smoothed`] unless `smoothing` is 0.
fn curve(run: usize, points: &[Point], marked: &[Point], smoothing: f64) -> Curve {
    let lost = points.iter().chain(marked).filter(|point| point.1.is_nan()).map(|point| point.0);
    let mut lost: Vec<_> = lost.collect();
    lost.sort_by(f64::total_cmp);
    let smooth = if smoothing > 0.0 { thinned(&smoothed(points, smoothing)) } else { vec![] };
    Curve { look: Look::of(run), raw: thinned(points), smooth, marked: thinned(marked), lost }
}

fn curves(runs: &[PlotRun], points: fn(&PlotRun) -> &[Point]) -> Vec<Curve> {
    runs.iter().enumerate().map(|(i, run)| curve(i, points(run), &[], weight(runs))).collect()
}

fn numbers<'a>(runs: &'a [PlotRun], points: fn(&PlotRun) -> &[Point]) -> impl Iterator<Item = f64> + 'a {
    runs.iter().flat_map(points).map(|point| point.1).filter(|value| !value.is_nan())
}

/// What is said of values that the axis does not reach.
fn beyond(y: &Axis, values: impl Iterator<Item = f64>) -> String {
    let (low, high) = y.ends();
    let outside = values.filter(|value| !value.is_nan() && !(low..=high).contains(value)).count();
    match outside {
        0 => String::new(),
        1 => " 1 value beyond the axis is drawn at its end.".into(),
        _ => format!(" {outside} values beyond the axis are drawn at its end."),
    }
}

fn loss(runs: &[PlotRun]) -> Option<CurvePanel> {
    if runs.iter().all(|run| run.loss.is_empty() && run.held_out.is_empty()) {
        return None;
    }
    let (low, high) = usual_range(runs.iter().map(|run| run.loss.as_slice()))
        .or_else(|| usual_range(runs.iter().map(|run| run.held_out.as_slice())))
        .unwrap_or((0.0, 1.0));
    // Where the runs have come to by held-out loss is shown too, unless that is far away.
    let far = high + (high - low).max(1.0 + low.abs());
    let held_out =
        || runs.iter().flat_map(|run| quantile(run.held_out.iter().map(|p| p.1), 0.0).into_iter().chain(last(run)));
    let range =
        held_out().filter(|loss| *loss <= far).fold((low, high), |(low, high), loss| (low.min(loss), high.max(loss)));
    let (low, high) = padded(range, 0.04);
    let y = Axis::linear(low, high, 7);
    let all = runs.iter().flat_map(|run| run.loss.iter().chain(&run.held_out)).map(|point| point.1);
    let notes = format!(
        "Mean cross entropy of each logged step's batch. Markers: held-out loss. x at the top: not finite.{}",
        beyond(&y, all)
    );
    Some(CurvePanel {
        heading: Heading::new("Training loss", &notes),
        unit: "loss (nats per token)",
        height: 440,
        x: steps(runs),
        y,
        curves: runs.iter().enumerate().map(|(i, run)| curve(i, &run.loss, &run.held_out, weight(runs))).collect(),
    })
}

/// Points of `run` less those of `first` at the same step.
fn less(run: &[Point], first: &[Point]) -> Vec<Point> {
    // Steps are whole numbers.
    let first: BTreeMap<_, _> = first.iter().map(|point| (point.0 as usize, point.1)).collect();
    run.iter().filter_map(|(step, value)| Some((*step, value - first.get(&(*step as usize))?))).collect()
}

fn difference(runs: &[PlotRun]) -> Option<CurvePanel> {
    let [first, others @ ..] = runs else { return None };
    let points = others.iter().map(|run| [less(&run.loss, &first.loss), less(&run.held_out, &first.held_out)]);
    let points: Vec<_> = points.collect();
    let all = || points.iter().flatten().flatten().map(|point| point.1);
    all().find(|value| !value.is_nan())?;
    // The middle of the runs, so that one that has diverged does not squash the others.
    let usual = |[loss, held_out]: &[Vec<Point>; 2]| {
        let (share, times) = if loss.len() < MANY { (1.0, 1.05) } else { (0.9, 2.0) };
        let [loss, held_out] = [loss, held_out].map(|points| points.iter().map(|point| point.1.abs()));
        Some(times * quantile(loss, share).into_iter().chain(quantile(held_out, 1.0)).max_by(f64::total_cmp)?)
    };
    let usual = quantile(points.iter().filter_map(usual), 0.5).filter(|usual| *usual > 0.0).unwrap_or(1.0);
    let y = Axis::linear(-usual, usual, 5);
    let notes = format!("At the same step. Markers: held-out loss.{}", beyond(&y, all()));
    let curves = (1..).zip(&points).map(|(i, [loss, held_out])| curve(i, loss, held_out, weight(runs)));
    Some(CurvePanel {
        heading: Heading::new(&format!("Training loss less that of {}", first.name), &notes),
        unit: "nats per token",
        height: 260,
        x: steps(runs),
        y,
        curves: curves.collect(),
    })
}

/// The last held-out loss that is a number.
fn last(run: &PlotRun) -> Option<f64> {
    run.held_out.iter().rev().map(|point| point.1).find(|loss| !loss.is_nan())
}

fn throughput(runs: &[PlotRun]) -> Option<CurvePanel> {
    let points: fn(&PlotRun) -> &[Point] = |run| &run.tokens_per_second;
    numbers(runs, points).find(|value| *value > 0.0)?;
    let usual = |run: &PlotRun| quantile(points(run).iter().map(|point| point.1), 0.99);
    let high = runs.iter().filter_map(usual).max_by(f64::total_cmp).filter(|high| *high > 0.0).unwrap_or(1.0);
    let y = Axis::linear(0.0, 1.08 * high, 5);
    Some(CurvePanel {
        heading: Heading::new(
            "Throughput",
            &format!("Between a logged step and the one before it.{}", beyond(&y, numbers(runs, points))),
        ),
        unit: "tokens/s",
        height: 280,
        x: steps(runs),
        y,
        curves: curves(runs, points),
    })
}

fn grad_norm(runs: &[PlotRun]) -> Option<CurvePanel> {
    let points: fn(&PlotRun) -> &[Point] = |run| &run.grad_norm;
    let lost = || runs.iter().flat_map(points).any(|point| point.1.is_nan());
    let positive = || numbers(runs, points).filter(|value| *value > 0.0);
    let high = positive().max_by(f64::total_cmp).or_else(|| lost().then_some(1.0))?;
    let low = positive().min_by(f64::total_cmp).unwrap_or(high);
    // Eight decades at most.
    let y = Axis::log(low.max(high * 1e-8).max(1e-38), high.max(1e-38));
    let notes = format!("Global, before clipping. Logarithmic.{}", beyond(&y, numbers(runs, points)));
    Some(CurvePanel {
        heading: Heading::new("Gradient norm", &notes),
        unit: "L2 norm",
        height: 340,
        x: steps(runs),
        y,
        curves: curves(runs, points),
    })
}

fn learning_rate(runs: &[PlotRun]) -> Option<CurvePanel> {
    let high = numbers(runs, |run| &run.lr).filter(|value| *value > 0.0).max_by(f64::total_cmp)?;
    let curve = |(i, run): (usize, &PlotRun)| curve(i, &run.lr, &[], 0.0);
    Some(CurvePanel {
        heading: Heading::new("Learning rate", ""),
        unit: "rate",
        height: 170,
        x: steps(runs),
        y: Axis::linear(0.0, 1.08 * high, 3),
        curves: runs.iter().enumerate().map(curve).collect(),
    })
}
