//! The panels of curves: losses, throughput, gradient norms, learning rates.

use super::axis::Axis;
use super::canvas::Look;
use super::panel::{Curve, CurvePanel, Heading};
use super::series::{Point, padded, quantile, smoothed, thinned, usual_range};
use super::source::PlotRun;

/// Ticks of the axis of steps, about.
const STEP_TICKS: usize = 7;

/// Those that some run has data for, from top to bottom.
pub(super) fn panels(runs: &[PlotRun]) -> Vec<CurvePanel> {
    [loss(runs), throughput(runs), grad_norm(runs), learning_rate(runs)].into_iter().flatten().collect()
}

/// The same for all panels, so that what happened at a step is below each other.
fn steps(runs: &[PlotRun]) -> Axis {
    let all = || runs.iter().flat_map(|run| run.loss.iter().chain(&run.held_out)).map(|point| point.0);
    let low = all().min_by(f64::total_cmp).unwrap_or_default();
    let high = all().max_by(f64::total_cmp).unwrap_or_default();
    Axis::steps(low, high, STEP_TICKS)
}

fn curve(run: usize, points: &[Point], marked: &[Point]) -> Curve {
    let lost = points.iter().chain(marked).filter(|point| point.1.is_nan()).map(|point| point.0);
    let mut lost: Vec<_> = lost.collect();
    lost.sort_by(f64::total_cmp);
    let smooth = thinned(&smoothed(points));
    Curve { look: Look::of(run), raw: thinned(points), smooth, marked: thinned(marked), lost }
}

fn curves(runs: &[PlotRun], points: fn(&PlotRun) -> &[Point]) -> Vec<Curve> {
    runs.iter().enumerate().map(|(i, run)| curve(i, points(run), &[])).collect()
}

fn numbers<'a>(runs: &'a [PlotRun], points: fn(&PlotRun) -> &[Point]) -> impl Iterator<Item = f64> + 'a {
    runs.iter().flat_map(points).map(|point| point.1).filter(|value| !value.is_nan())
}

/// What is said of values that the axis does not reach.
fn beyond(y: &Axis, values: impl Iterator<Item = f64>) -> String {
    let (low, high) = y.ends();
    let outside = values.filter(|value| !value.is_nan() && !(low..=high).contains(value)).count();
    let s = if outside == 1 { "" } else { "s" };
    if outside == 0 { String::new() } else { format!(" {outside} value{s} beyond the axis are drawn at its end.") }
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
        heading: Heading::new("Training loss".into(), &notes),
        unit: "loss (nats per token)",
        height: 640,
        x: steps(runs),
        y,
        curves: runs.iter().enumerate().map(|(i, run)| curve(i, &run.loss, &run.held_out)).collect(),
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
            "Throughput".into(),
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
        heading: Heading::new("Gradient norm".into(), &notes),
        unit: "L2 norm",
        height: 340,
        x: steps(runs),
        y,
        curves: curves(runs, points),
    })
}

fn learning_rate(runs: &[PlotRun]) -> Option<CurvePanel> {
    let high = numbers(runs, |run| &run.lr).filter(|value| *value > 0.0).max_by(f64::total_cmp)?;
    let curve = |(i, run): (usize, &PlotRun)| Curve { smooth: vec![], ..curve(i, &run.lr, &[]) };
    Some(CurvePanel {
        heading: Heading::new("Learning rate".into(), ""),
        unit: "rate",
        height: 170,
        x: steps(runs),
        y: Axis::linear(0.0, 1.08 * high, 3),
        curves: runs.iter().enumerate().map(curve).collect(),
    })
}
