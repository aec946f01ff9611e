//! Escapes control characters of names and files for output on terminals.

use std::io::{self, Write};

/// Escapes control characters, except line ends and tabs, as `\\u{1b}`.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => out.push(c),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// Terminal codes that begin and end a colour.
pub const COLOUR: [&str; 2] = ["\u{1b}[32m", "\u{1b}[0m"];

/// Writer that applies [`escaped`]. Bytes that are not UTF-8 pass unchanged.
///
/// A code of [`COLOUR`] in a separate write passes too.
#[derive(Debug)]
pub struct EscapedWriter<W>(W);

impl<W: Write> EscapedWriter<W> {
    /// Writes to `out`.
    pub fn new(out: W) -> Self {
        Self(out)
    }
}

impl<W: Write> Write for EscapedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if COLOUR.iter().any(|code| code.as_bytes() == bytes) {
            self.0.write_all(bytes)?;
            return Ok(bytes.len());
        }
        for chunk in bytes.utf8_chunks() {
            self.0.write_all(escaped(chunk.valid()).as_bytes())?;
            self.0.write_all(chunk.invalid())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_controls_a_terminal_is_written_out() {
        let text = "caf\u{e9}\t\u{1b}[2Jred\r\u{7f}\u{9b}0m\n";
        let expected = "caf\u{e9}\t\\u{1b}[2Jred\\u{d}\\u{7f}\\u{9b}0m\n";
        assert_eq!(escaped(text), expected);
        let mut writer = EscapedWriter::new(vec![]);
        write!(writer, "{text}").unwrap();
        writer.write_all(b"\xff\x1b").unwrap();
        assert_eq!(writer.0, [expected.as_bytes(), b"\xff\\u{1b}"].concat());
    }
}
