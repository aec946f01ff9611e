//! Legend: colours and names of the runs, and their held-out losses.

use plotters::element::PathElement;
use plotters::style::Color;

use crate::metrics::{better, thousands};

use super::Panel;
use super::look::{Area, GREY, INK, Look, MARGIN, NORMAL, SMALL, fitted, letters};
use super::series::{BINS, MAX_POINTS, Point};
use super::source::{PlotRun, longest, weight};

const ROW: i32 = 40;
/// Positions of names, descriptions and losses.
const COLUMNS: [i32; 3] = [120, 640, 1080];

/// Panel with a row per run.
pub(super) fn panel(runs: &[PlotRun]) -> Panel<'_> {
    let (w, mut notes) = (weight(runs), vec![]);
    if w > 0.0 {
        notes.push(format!("Faint: each logged step. Thick: exponential moving average, decay {w}, bias-corrected."));
    }
    if longest(runs) > MAX_POINTS {
        notes.push(format!(
            "Curves of more than {MAX_POINTS} points are drawn as the first, the last, and the smallest and largest of each of at most {BINS} bins."
        ));
    }
    let styles = [letters(NORMAL, INK), letters(SMALL, GREY), letters(SMALL, INK)];
    let draw = Box::new(move |area: &Area<'_>| {
        for (i, run) in runs.iter().enumerate() {
            let (look, y) = (Look::of(i), i as i32 * ROW + ROW / 2);
            let line = [(MARGIN, y), (COLUMNS[0] - 20, y)];
            area.draw(&PathElement::new(line.to_vec(), look.color.stroke_width(5)))?;
            area.draw(&look.marker(((line[0].0 + line[1].0) / 2, y)))?;
            let texts = [fitted(&run.name, 34), fitted(&run.what, 32), end(run)];
            for ((text, style), x) in texts.iter().zip(&styles).zip(COLUMNS) {
                area.draw_text(text, style, (x, y))?;
            }
        }
        Ok(())
    });
    Panel { title: "Runs".into(), notes, height: runs.len() as i32 * ROW + 40, draw }
}

/// Result of a run.
fn end(run: &PlotRun) -> String {
    match run.diverged {
        Some(step) => format!("diverged at step {}", thousands(&step.to_string())),
        None => held_out(&run.held_out),
    }
}

fn held_out(losses: &[Point]) -> String {
    let numbers = || losses.iter().copied().filter(|point| !point.1.is_nan());
    let (Some((_, last)), Some((step, best))) = (numbers().next_back(), numbers().reduce(better)) else {
        return "no held-out loss".into();
    };
    let text = |loss: f64| if loss.abs() < 1e5 { format!("{loss:.4}") } else { format!("{loss:.3e}") };
    format!("held-out: last {}, best {} (step {})", text(last), text(best), thousands(&step.to_string()))
}
