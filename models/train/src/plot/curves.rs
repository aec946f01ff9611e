//! Charts of the panels: losses, their differences, throughput, gradient norms, learning rates.

use std::collections::BTreeMap;

use super::Panel;
use super::chart::{Chart, Curve, log_ticks};
use super::kind::PlotPanel;
use super::series::{MANY, Point, padded, quantile, usual_range};
use super::source::{PlotRun, weight};

/// Panel of this kind, if a run has data for it. Health is a heat map, not a chart.
pub(super) fn panel(kind: PlotPanel, runs: &[PlotRun]) -> Option<Panel<'_>> {
    let steps = || runs.iter().flat_map(|run| run.loss.iter().chain(&run.held_out)).map(|point| point.0);
    let of = |unit, height, curves: Vec<Curve>| Chart {
        unit,
        height,
        // All panels share one axis of steps, so that they align.
        steps: (steps().min().unwrap_or_default(), steps().max().unwrap_or_default()),
        y: 0.0..1.0,
        ticks: None,
        smoothing: weight(runs),
        curves,
    };
    let (title, note, chart) = match kind {
        PlotPanel::Losses => {
            let chart = losses(of("loss (nats per token)", 440, curves(runs, |run| [&run.loss, &run.held_out])))?;
            let note =
                "Mean cross entropy of each logged step's batch. Markers: held-out loss. x at the top: not finite.";
            ("Training loss".into(), note, chart)
        }
        PlotPanel::Difference => {
            let chart = differences(of("nats per token", 260, less_first(runs)))?;
            let title = format!("Training loss less that of {}", runs[0].name);
            (title, "At the same step. Markers: held-out loss.", chart)
        }
        PlotPanel::Throughput => {
            let chart = throughput(of("tokens/s", 280, curves(runs, |run| [&run.tokens_per_second, &[]])))?;
            ("Throughput".into(), "Between a logged step and the one before it.", chart)
        }
        PlotPanel::GradNorm => {
            let chart = grad_norm(of("L2 norm", 340, curves(runs, |run| [&run.grad_norm, &[]])))?;
            ("Gradient norm".into(), "Global, before clipping. Logarithmic.", chart)
        }
        PlotPanel::Lr => {
            let chart = learning_rate(of("rate", 170, curves(runs, |run| [&run.lr, &[]])))?;
            ("Learning rate".into(), "", chart)
        }
        PlotPanel::Health => return None,
    };
    let notes = [note.to_string(), chart.beyond()].into_iter().filter(|note| !note.is_empty()).collect();
    Some(Panel { title, notes, height: chart.all_height(), draw: Box::new(move |area| chart.draw(area)) })
}

/// Line and marked points of each run.
fn curves(runs: &[PlotRun], points: fn(&PlotRun) -> [&[Point]; 2]) -> Vec<Curve> {
    let curve = |(run, points): (usize, [&[Point]; 2])| Curve::new(run, points.map(<[Point]>::to_vec));
    runs.iter().map(points).enumerate().map(curve).collect()
}

/// Losses of all runs except the first, minus the first run's at the same step.
fn less_first(runs: &[PlotRun]) -> Vec<Curve> {
    let less = |run: &[Point], first: &[Point]| -> Vec<Point> {
        let first: BTreeMap<_, _> = first.iter().copied().collect();
        run.iter().filter_map(|(step, value)| Some((*step, value - first.get(step)?))).collect()
    };
    let Some((first, others)) = runs.split_first() else { return vec![] };
    let both = |run: &PlotRun| [less(&run.loss, &first.loss), less(&run.held_out, &first.held_out)];
    (1..).zip(others).map(|(i, run)| Curve::new(i, both(run))).collect()
}

fn losses(chart: Chart) -> Option<Chart> {
    if chart.curves.iter().all(|curve| curve.line.is_empty() && curve.marked.is_empty()) {
        return None;
    }
    let (low, high) = usual_range(chart.curves.iter().map(|curve| curve.line.as_slice()))
        .or_else(|| usual_range(chart.curves.iter().map(|curve| curve.marked.as_slice())))
        .unwrap_or((0.0, 1.0));
    // The range includes the last and the best held-out loss of each run, unless they are far away.
    let far = high + (high - low).max(1.0 + low.abs());
    let come_to = |curve: &Curve| {
        let numbers = || curve.marked.iter().map(|point| point.1).filter(|loss| !loss.is_nan());
        [numbers().min_by(f64::total_cmp), numbers().next_back()]
    };
    let held_out = chart.curves.iter().flat_map(come_to).flatten().filter(|loss| *loss <= far);
    let range = held_out.fold((low, high), |(low, high), loss| (low.min(loss), high.max(loss)));
    let (low, high) = padded(range, 0.04);
    Some(Chart { y: low..high, ..chart })
}

fn differences(chart: Chart) -> Option<Chart> {
    chart.values().next()?;
    // Median of the runs, so that a diverged run does not squash the others.
    let usual = |Curve { line, marked, .. }: &Curve| {
        let (share, times) = if line.len() < MANY { (1.0, 1.05) } else { (0.9, 2.0) };
        let [line, marked] = [line, marked].map(|points| points.iter().map(|point| point.1.abs()));
        Some(times * quantile(line, share).into_iter().chain(quantile(marked, 1.0)).max_by(f64::total_cmp)?)
    };
    let usual = quantile(chart.curves.iter().filter_map(usual), 0.5).filter(|usual| *usual > 0.0).unwrap_or(1.0);
    Some(Chart { y: -usual..usual, ..chart })
}

fn throughput(chart: Chart) -> Option<Chart> {
    chart.values().find(|value| *value > 0.0)?;
    let usual = |curve: &Curve| quantile(curve.line.iter().map(|point| point.1), 0.99);
    let high = chart.curves.iter().filter_map(usual).max_by(f64::total_cmp).filter(|high| *high > 0.0).unwrap_or(1.0);
    Some(Chart { y: 0.0..1.08 * high, ..chart })
}

fn grad_norm(chart: Chart) -> Option<Chart> {
    let lost = || chart.curves.iter().flat_map(|curve| &curve.line).any(|point| point.1.is_nan());
    let positive = || chart.values().filter(|value| *value > 0.0);
    let high = positive().max_by(f64::total_cmp).or_else(|| lost().then_some(1.0))?;
    let low = positive().min_by(f64::total_cmp).unwrap_or(high);
    // At most eight decades.
    let ticks = log_ticks(low.max(high * 1e-8).max(1e-38), high.max(1e-38));
    Some(Chart { y: ticks[0]..ticks[ticks.len() - 1], ticks: Some(ticks), ..chart })
}

fn learning_rate(chart: Chart) -> Option<Chart> {
    let high = chart.values().filter(|value| *value > 0.0).max_by(f64::total_cmp)?;
    // Learning rates have no noise.
    Some(Chart { y: 0.0..1.08 * high, smoothing: 0.0, ..chart })
}
