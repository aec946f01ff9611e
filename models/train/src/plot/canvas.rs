//! Shapes and texts of an SVG: colours that the colour-blind can tell apart, texts that are cut to a width.
//!
//! A text's width is estimated, since the browser chooses the font.

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, Drawable, PathElement, PointCollection, Polygon, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{
    BLACK, Color, FontStyle, FontTransform, IntoFont, RGBAColor, RGBColor, ShapeStyle, TextStyle, WHITE,
};

use super::error::PlotError;

/// Units of length across the picture. A browser shows them as half as many pixels, so that lines fall between pixels.
pub(super) const WIDTH: i32 = 1800;
/// Heights of letters, in units.
pub(super) const SMALL: i32 = 23;
pub(super) const NORMAL: i32 = 26;
/// Bold.
pub(super) const LARGE: i32 = 32;

pub(super) const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
pub(super) const GREY: RGBColor = RGBColor(0x5F, 0x5F, 0x5F);
pub(super) const PALE: RGBColor = RGBColor(0xDD, 0xDD, 0xDD);

/// Okabe and Ito's colours, without the yellow that white swallows.
const PALETTE: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
    RGBColor(0x00, 0x00, 0x00),
];

/// What tells a run from others: after seven, the colours come again, darker (grey for black) and with another marker.
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
}

/// Which end of a text, or its middle, is at the place given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Anchor {
    Left,
    Middle,
    Right,
    /// The middle, read from below.
    Upwards,
}

/// The picture.
pub(super) struct Canvas<'a>(DrawingArea<SVGBackend<'a>, Shift>);

impl<'a> Canvas<'a> {
    /// White, [`WIDTH`] wide.
    fn new(svg: &'a mut String, height: i32) -> Result<Self, PlotError> {
        let canvas = Self(SVGBackend::with_string(svg, (WIDTH as u32, height as u32)).into_drawing_area());
        canvas.rectangle((0, 0), (WIDTH, height), WHITE)?;
        Ok(canvas)
    }

    fn draw<E>(&self, element: &E) -> Result<(), PlotError>
    where
        for<'b> &'b E: PointCollection<'b, (i32, i32)>,
        E: Drawable<SVGBackend<'a>>,
    {
        self.0.draw(element).map_err(|error| PlotError::Draw { reason: error.to_string() })
    }

    pub(super) fn line(&self, points: Vec<(i32, i32)>, color: RGBAColor, width: u32) -> Result<(), PlotError> {
        self.draw(&PathElement::new(points, ShapeStyle { color, filled: false, stroke_width: width }))
    }

    pub(super) fn rectangle(&self, from: (i32, i32), to: (i32, i32), color: RGBColor) -> Result<(), PlotError> {
        self.draw(&Rectangle::new([from, to], color.filled()))
    }

    pub(super) fn dot(&self, at: (i32, i32), radius: i32, color: RGBAColor) -> Result<(), PlotError> {
        self.draw(&Circle::new(at, radius, color.filled()))
    }

    /// A run's marker.
    pub(super) fn marker(&self, (x, y): (i32, i32), Look { color, marker }: Look) -> Result<(), PlotError> {
        let corners = match marker {
            0 => return self.dot((x, y), 8, color.to_rgba()),
            1 => vec![(x - 7, y - 7), (x + 7, y - 7), (x + 7, y + 7), (x - 7, y + 7)],
            2 => vec![(x, y - 10), (x + 9, y + 7), (x - 9, y + 7)],
            _ => vec![(x, y - 10), (x + 10, y), (x, y + 10), (x - 10, y)],
        };
        self.draw(&Polygon::new(corners, color.filled()))
    }

    /// An x.
    pub(super) fn cross(&self, (x, y): (i32, i32), color: RGBColor) -> Result<(), PlotError> {
        for slope in [-7, 7] {
            self.line(vec![(x - 7, y - slope), (x + 7, y + slope)], color.to_rgba(), 3)?;
        }
        Ok(())
    }

    /// One line, `at` being half way between its top and its bottom.
    pub(super) fn text(
        &self,
        text: &str,
        at: (i32, i32),
        (size, color, anchor): (i32, RGBColor, Anchor),
    ) -> Result<(), PlotError> {
        // Plotters divides by this.
        let font = ("sans-serif", f64::from(size) * 1.24).into_font();
        let font = if size == LARGE { font.style(FontStyle::Bold) } else { font };
        let (h_pos, transform) = match anchor {
            Anchor::Left => (HPos::Left, FontTransform::None),
            Anchor::Middle => (HPos::Center, FontTransform::None),
            Anchor::Right => (HPos::Right, FontTransform::None),
            Anchor::Upwards => (HPos::Center, FontTransform::Rotate270),
        };
        let style = TextStyle::from(font.transform(transform)).color(&color).pos(Pos { h_pos, v_pos: VPos::Center });
        self.draw(&Text::new(text.to_owned(), at, style))
    }
}

/// An SVG that is `height` units high.
pub(super) fn svg(height: i32, draw: impl FnOnce(&Canvas) -> Result<(), PlotError>) -> Result<String, PlotError> {
    let mut svg = String::new();
    let canvas = Canvas::new(&mut svg, height)?;
    draw(&canvas)?;
    canvas.0.present().map_err(|error| PlotError::Draw { reason: error.to_string() })?;
    drop(canvas);
    let units = format!("width=\"{WIDTH}\" height=\"{height}\"");
    Ok(svg.replacen(&units, &format!("width=\"{}\" height=\"{}\"", WIDTH / 2, height / 2), 1))
}

/// Units that a text takes at most in usual fonts.
pub(super) fn width(text: &str, size: i32) -> i32 {
    let letter = |letter: char| match letter {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | ' ' => 0.34,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.95,
        'A'..='Z' => 0.72,
        '\0'..='\x7F' => 0.58,
        _ => 1.0,
    };
    (text.chars().map(letter).sum::<f64>() * f64::from(size)).ceil() as i32
}

/// `text` in at most `room` units: what does not fit is left out in the middle, since names differ at their ends.
pub(super) fn fitted(text: &str, size: i32, room: i32) -> String {
    // No letter is narrower than a third of `size`: of a longer text, letters in the middle are certainly left out.
    let most = 3 * (room / size.max(1)).max(0) as usize + 3;
    let long = text.chars().nth(2 * most).is_some();
    let ends = || text.chars().take(most).chain(text.chars().rev().take(most).collect::<Vec<_>>().into_iter().rev());
    let text: String = if long { ends().collect() } else { text.into() };
    // What XML does not allow.
    let letters: Vec<char> = text
        .chars()
        .map(
            |letter| if letter.is_control() || matches!(letter, '\u{FFFE}' | '\u{FFFF}') { '\u{FFFD}' } else { letter },
        )
        .collect();
    let cut = |kept: usize| -> String {
        let (head, tail) = (kept.div_ceil(2), kept / 2);
        letters[..head].iter().chain(&['…']).chain(&letters[letters.len() - tail..]).collect()
    };
    let whole: String = letters.iter().collect();
    match width(&whole, size) <= room {
        true => whole,
        false => (0..letters.len()).rev().map(cut).find(|cut| width(cut, size) <= room).unwrap_or_default(),
    }
}

/// `text` in lines of at most `room` units, where its words allow.
pub(super) fn wrapped(text: &str, size: i32, room: i32) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(&format!("{line} {word}"), size) <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_fit() {
        let long = format!("first{}last", "-".repeat(200));
        let cut = fitted(&long, NORMAL, 300);
        assert!(cut.starts_with("first-") && cut.ends_with("-last") && cut.contains('…'), "{cut}");
        assert!((270..=300).contains(&width(&cut, NORMAL)));
        assert_eq!(fitted("short\u{1}", NORMAL, 300), "short\u{FFFD}");
        assert_eq!(fitted("longer", NORMAL, 10), "");
        let name = |len: usize| format!("{}last", "i".repeat(len));
        assert_eq!(fitted(&name(10_000_000), NORMAL, 300), fitted(&name(500), NORMAL, 300));
        let lines = wrapped(&"word ".repeat(50), SMALL, 400);
        assert!(lines.len() > 4 && lines.iter().all(|line| width(line, SMALL) <= 400), "{lines:?}");
    }

    #[test]
    fn looks_differ() {
        let looks: Vec<_> = (0..28).map(Look::of).collect();
        assert!((0..28).all(|i| !looks[..i].contains(&looks[i])));
    }
}
