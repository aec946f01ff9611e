//! Which colour is which run, and what its held-out loss came to.

use plotters::style::Color;

use crate::metrics::thousands;

use super::canvas::{Anchor, Canvas, GREY, INK, Look, NORMAL, SMALL, fitted, width, wrapped};
use super::error::PlotError;
use super::panel::{MARGIN, Panel, RIGHT};
use super::series::{BINS, MAX_POINTS, Point};
use super::source::{PlotRun, longest, weight};

const ROW: i32 = 40;
const LINE: i32 = SMALL + 8;
/// Where names, what the runs are (or before, if no name is so long), and their losses begin.
const NAME: i32 = 120;
const WHAT: i32 = 640;
const LOSS: i32 = 1080;

/// A row for each run.
pub(super) struct Legend {
    rows: Vec<[String; 3]>,
    what: i32,
    notes: Vec<String>,
}

impl Legend {
    pub(super) fn new(runs: &[PlotRun]) -> Self {
        let names: Vec<_> = runs.iter().map(|run| fitted(&run.name, NORMAL, WHAT - NAME - 20)).collect();
        let what = NAME + 20 + names.iter().map(|name| width(name, NORMAL)).max().unwrap_or(0);
        let row = |(run, name): (&PlotRun, String)| {
            [name, fitted(&run.what, SMALL, LOSS - what - 20), fitted(&end(run), SMALL, RIGHT - LOSS)]
        };
        let rows = runs.iter().zip(names).map(row).collect();
        let mut notes = String::new();
        let w = weight(runs);
        if w > 0.0 {
            notes = format!("Faint: each logged step. Thick: exponential moving average, decay {w}, bias-corrected.");
        }
        if longest(runs) > MAX_POINTS {
            notes += &format!(
                " Curves of more than {MAX_POINTS} points are drawn as the first, the last, and the smallest and largest of each of at most {BINS} bins."
            );
        }
        Self { rows, what, notes: wrapped(&notes, SMALL, RIGHT - MARGIN) }
    }
}

/// What became of a run.
fn end(run: &PlotRun) -> String {
    match run.diverged {
        Some(step) => format!("diverged at step {}", thousands(&step.to_string())),
        None => held_out(&run.held_out),
    }
}

fn held_out(losses: &[Point]) -> String {
    let numbers = || losses.iter().filter(|point| !point.1.is_nan());
    let (Some((_, last)), Some((step, best))) = (numbers().next_back(), numbers().min_by(|a, b| a.1.total_cmp(&b.1)))
    else {
        return "no held-out loss".into();
    };
    let text = |loss: f64| if loss.abs() < 1e5 { format!("{loss:.4}") } else { format!("{loss:.3e}") };
    format!("held-out: last {}, best {} (step {})", text(*last), text(*best), thousands(&step.to_string()))
}

impl Panel for Legend {
    fn height(&self) -> i32 {
        self.rows.len() as i32 * ROW + self.notes.len() as i32 * LINE + 40
    }

    fn draw(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        for (i, [name, what, losses]) in (0..).zip(&self.rows) {
            let (look, y) = (Look::of(i as usize), top + i * ROW + ROW / 2);
            canvas.line(vec![(MARGIN, y), (NAME - 20, y)], look.color.to_rgba(), 5)?;
            canvas.marker(((MARGIN + NAME - 20) / 2, y), look)?;
            canvas.text(name, (NAME, y), (NORMAL, INK, Anchor::Left))?;
            canvas.text(what, (self.what, y), (SMALL, GREY, Anchor::Left))?;
            canvas.text(losses, (LOSS, y), (SMALL, INK, Anchor::Left))?;
        }
        let below = top + self.rows.len() as i32 * ROW + 8;
        for (i, note) in (0..).zip(&self.notes) {
            canvas.text(note, (MARGIN, below + i * LINE + LINE / 2), (SMALL, GREY, Anchor::Left))?;
        }
        Ok(())
    }
}
