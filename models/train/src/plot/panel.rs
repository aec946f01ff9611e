//! A panel of curves over steps.

use plotters::style::Color;

use super::axis::Axis;
use super::canvas::{Anchor, Canvas, GREY, INK, LARGE, Look, NORMAL, PALE, SMALL, WIDTH, fitted, wrapped};
use super::error::PlotError;
use super::series::Point;

/// Where panels begin, curves begin and all ends, from the left.
pub(super) const MARGIN: i32 = 24;
const LEFT: i32 = 210;
pub(super) const RIGHT: i32 = WIDTH - 80;
const LINE: i32 = SMALL + 8;
/// Markers of a run at most: they would hide each other.
const MAX_MARKERS: usize = 60;

/// A part of the picture, as wide as it is.
pub(super) trait Panel {
    /// Units.
    fn height(&self) -> i32;
    /// Draws it from `top` on.
    fn draw(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError>;
}

/// A title and what is to be known to read the panel below.
pub(super) struct Heading {
    title: String,
    notes: Vec<String>,
}

impl Heading {
    pub(super) fn new(title: &str, notes: &str) -> Self {
        let title = fitted(title, LARGE, RIGHT - MARGIN);
        Self { title, notes: wrapped(notes, SMALL, RIGHT - MARGIN) }
    }
}

impl Panel for Heading {
    fn height(&self) -> i32 {
        LARGE + 16 + self.notes.len() as i32 * LINE + 16
    }

    fn draw(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        canvas.text(&self.title, (MARGIN, top + LARGE / 2), (LARGE, INK, Anchor::Left))?;
        let below = top + LARGE + 16;
        for (i, note) in (0..).zip(&self.notes) {
            canvas.text(note, (MARGIN, below + i * LINE + LINE / 2), (SMALL, GREY, Anchor::Left))?;
        }
        Ok(())
    }
}

/// What a panel shows of a run. A NaN parts two lines.
#[derive(Debug)]
pub(super) struct Curve {
    pub look: Look,
    /// Thin and faint if there is a smoothed one.
    pub raw: Vec<Point>,
    pub smooth: Vec<Point>,
    /// A thin line with markers.
    pub marked: Vec<Point>,
    /// Steps whose value cannot be drawn.
    pub lost: Vec<f64>,
}

/// Curves over steps.
pub(super) struct CurvePanel {
    pub heading: Heading,
    pub unit: &'static str,
    /// The height of the curves alone, in units.
    pub height: i32,
    pub x: Axis,
    pub y: Axis,
    pub curves: Vec<Curve>,
}

impl CurvePanel {
    fn at(&self, top: i32, (x, y): Point) -> (i32, i32) {
        let along = |share: f64, length: i32| (share * f64::from(length)).round() as i32;
        (LEFT + along(self.x.share(x), RIGHT - LEFT), top + self.height - along(self.y.share(y), self.height))
    }

    fn grid(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        let bottom = top + self.height;
        for (value, label) in &self.x.ticks {
            let x = self.at(top, (*value, f64::MIN_POSITIVE)).0;
            canvas.line(vec![(x, top), (x, bottom)], PALE.to_rgba(), 1)?;
            canvas.text(label, (x, bottom + 24), (NORMAL, INK, Anchor::Middle))?;
        }
        for (value, label) in &self.y.ticks {
            let y = self.at(top, (0.0, *value)).1;
            canvas.line(vec![(LEFT, y), (RIGHT, y)], PALE.to_rgba(), 1)?;
            canvas.text(label, (LEFT - 14, y), (NORMAL, INK, Anchor::Right))?;
        }
        let frame = [(LEFT, top), (RIGHT, top), (RIGHT, bottom), (LEFT, bottom), (LEFT, top)];
        canvas.line(frame.to_vec(), GREY.to_rgba(), 2)?;
        canvas.text("optimizer step", ((LEFT + RIGHT) / 2, bottom + 58), (NORMAL, INK, Anchor::Middle))?;
        canvas.text(self.unit, (MARGIN + 12, (top + bottom) / 2), (NORMAL, INK, Anchor::Upwards))
    }

    fn lines(&self, canvas: &Canvas, top: i32, points: &[Point], look: (Look, f64, u32)) -> Result<(), PlotError> {
        let (Look { color, .. }, opacity, width) = look;
        for line in points.split(|point| point.1.is_nan()).filter(|line| !line.is_empty()) {
            let mut line: Vec<_> = line.iter().map(|point| self.at(top, *point)).collect();
            line.dedup();
            match line[..] {
                [alone] => canvas.dot(alone, width as i32 + 3, color.mix(opacity))?,
                _ => canvas.line(line, color.mix(opacity), width)?,
            }
        }
        Ok(())
    }

    fn markers(&self, canvas: &Canvas, top: i32, curve: &Curve) -> Result<(), PlotError> {
        let numbers: Vec<_> = curve.marked.iter().filter(|point| !point.1.is_nan()).collect();
        let every = numbers.len().div_ceil(MAX_MARKERS).max(1);
        // From the end: the last one is what the run has come to.
        for point in numbers.iter().rev().step_by(every) {
            canvas.marker(self.at(top, **point), curve.look)?;
        }
        let mut last = None;
        for step in &curve.lost {
            let x = self.at(top, (*step, f64::MIN_POSITIVE)).0;
            if last.is_none_or(|last| x - last >= 16) {
                canvas.cross((x, top + 12), curve.look.color)?;
                last = Some(x);
            }
        }
        Ok(())
    }
}

impl Panel for CurvePanel {
    fn height(&self) -> i32 {
        self.heading.height() + self.height + 120
    }

    fn draw(&self, canvas: &Canvas, top: i32) -> Result<(), PlotError> {
        self.heading.draw(canvas, top)?;
        let top = top + self.heading.height();
        self.grid(canvas, top)?;
        for curve in &self.curves {
            let (opacity, width) = if curve.smooth.is_empty() { (0.9, 3) } else { (0.3, 2) };
            self.lines(canvas, top, &curve.raw, (curve.look, opacity, width))?;
        }
        for curve in &self.curves {
            self.lines(canvas, top, &curve.smooth, (curve.look, 1.0, 4))?;
        }
        for curve in &self.curves {
            self.lines(canvas, top, &curve.marked, (curve.look, 0.8, 2))?;
        }
        self.curves.iter().try_for_each(|curve| self.markers(canvas, top, curve))
    }
}
