//! Colours for the colour-blind, markers, fonts, and texts cut to a width.

use plotters::backend::{DrawingBackend, SVGBackend};
use plotters::coord::Shift;
use plotters::drawing::DrawingArea;
use plotters::element::{Circle, DynElement, IntoDynElement, PathElement, Polygon};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, FontStyle, IntoFont, RGBColor, TextStyle};
use unicode_width::UnicodeWidthChar;

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Width of the picture in units. A browser shows two units per pixel, so lines can lie between
/// pixels.
pub(super) const WIDTH: i32 = 1800;
/// Margins above and at the left, and at the right.
pub(super) const MARGIN: i32 = 24;
pub(super) const RIGHT: i32 = 80;
/// Font sizes. Plotters writes them divided by 1.24.
pub(super) const SMALL: i32 = 28;
pub(super) const NORMAL: i32 = 32;
/// Bold.
pub(super) const LARGE: i32 = 40;
/// Line height of small text, in units.
pub(super) const LINE: i32 = 31;

pub(super) const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
pub(super) const GREY: RGBColor = RGBColor(0x5F, 0x5F, 0x5F);
pub(super) const PALE: RGBColor = RGBColor(0xDD, 0xDD, 0xDD);

/// Colours of Okabe and Ito, without yellow, which is hard to see on white.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];

/// Colour and marker of a run. After seven runs the colours repeat, darker (grey for black) and
/// with another marker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Look {
    pub color: RGBColor,
    marker: usize,
}

impl Look {
    pub(super) fn of(run: usize) -> Self {
        let (color, round) = (PALETTE[run % PALETTE.len()], run / PALETTE.len());
        let darker = |part: u8| if color == BLACK { 0x99 } else { (f64::from(part) * 0.55) as u8 };
        let dark = RGBColor(darker(color.0), darker(color.1), darker(color.2));
        Self { color: if round % 2 == 0 { color } else { dark }, marker: round % 4 }
    }

    /// Marker of the run.
    pub(super) fn marker<DB: DrawingBackend>(self, (x, y): (i32, i32)) -> DynElement<'static, DB, (i32, i32)> {
        let corners = match self.marker {
            0 => return Circle::new((x, y), 8, self.color.filled()).into_dyn(),
            1 => vec![(x - 7, y - 7), (x + 7, y - 7), (x + 7, y + 7), (x - 7, y + 7)],
            2 => vec![(x, y - 10), (x + 9, y + 7), (x - 9, y + 7)],
            _ => vec![(x, y - 10), (x + 10, y), (x, y + 10), (x - 10, y)],
        };
        Polygon::new(corners, self.color.filled()).into_dyn()
    }

    /// Marker in the shape of an x.
    pub(super) fn cross(self, (x, y): (i32, i32)) -> [PathElement<(i32, i32)>; 2] {
        let strokes = [[(x - 7, y - 7), (x + 7, y + 7)], [(x - 7, y + 7), (x + 7, y - 7)]];
        strokes.map(|stroke| PathElement::new(stroke.to_vec(), self.color.stroke_width(3)))
    }
}

/// Text style: left-aligned, vertically centred.
pub(super) fn letters(size: i32, color: RGBColor) -> TextStyle<'static> {
    let font = ("sans-serif", size).into_font();
    let font = if size == LARGE { font.style(FontStyle::Bold) } else { font };
    TextStyle { font, color: color.to_backend_color(), pos: Pos::new(HPos::Left, VPos::Center) }
}

/// Width of `text` in usual letters.
pub(super) fn width(text: &str) -> usize {
    text.chars().filter_map(|letter| letter.width()).sum()
}

/// `text` cut to a width of `room` usual letters. The middle is cut, because names differ at their
/// ends.
pub(super) fn fitted(text: &str, room: usize) -> String {
    // XML does not allow some characters.
    let allowed = |c: char| if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') { '\u{FFFD}' } else { c };
    let text: String = text.chars().map(allowed).collect();
    if width(&text) <= room {
        return text;
    }
    let end = taken(text.chars().rev(), (room - 1) / 2);
    let begin = taken(text.chars(), room - 1 - width(&end));
    begin + "…" + &end.chars().rev().collect::<String>()
}

/// Letters that fit.
fn taken(letters: impl Iterator<Item = char>, room: usize) -> String {
    let mut used = 0;
    let fits = |letter: &char| {
        used += letter.width().unwrap_or(0);
        used <= room
    };
    letters.take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_fit() {
        assert_eq!(fitted(&format!("first{}last", "-".repeat(200)), 15), "first--…---last");
        assert_eq!(fitted("short\u{1}", 15), "short\u{FFFD}");
        assert_eq!(fitted("漢字かな混じり文", 9), "漢字…り文", "twice as wide");
    }

    #[test]
    fn looks_differ() {
        let looks: Vec<_> = (0..28).map(Look::of).collect();
        assert!((0..28).all(|i| !looks[..i].contains(&looks[i])));
    }
}
