//! [`JsonArray`]: the elements of a JSON array as they lie in a file, one at a time. What an element is, its reader finds out.

use std::io::{self, BufRead};

use super::error::MAX_DOCUMENT;

/// An iterator over elements: the line on which each begins, from 1, and its bytes.
pub(super) struct JsonArray<R> {
    reader: R,
    line: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Before,
    /// Between elements.
    Inside,
    Ended,
}

/// Why there is no next element.
pub(super) enum ArrayError {
    Io(io::Error),
    /// On this line.
    TooLong(u64),
    /// The file ends before the array does.
    Cut(u64),
    /// There is something else than an array.
    Syntax(u64),
}

impl<R: BufRead> JsonArray<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, line: 1, state: State::Before }
    }

    /// The next byte, white space too.
    fn byte(&mut self) -> Result<Option<u8>, ArrayError> {
        let byte = self.reader.fill_buf().map_err(ArrayError::Io)?.first().copied();
        self.reader.consume(usize::from(byte.is_some()));
        self.line += u64::from(byte == Some(b'\n'));
        Ok(byte)
    }

    fn element(&mut self) -> Result<Option<(u64, Vec<u8>)>, ArrayError> {
        while self.state == State::Before {
            match self.byte()? {
                Some(b'[') => self.state = State::Inside,
                // A byte order mark.
                Some(0xef | 0xbb | 0xbf) => {}
                Some(byte) if byte.is_ascii_whitespace() => {}
                _ => return Err(ArrayError::Syntax(self.line)),
            }
        }
        let (mut bytes, mut begin) = (vec![], self.line);
        let (mut depth, mut in_string, mut is_escaped) = (0_u64, false, false);
        loop {
            let Some(byte) = self.byte()? else { return Err(ArrayError::Cut(self.line)) };
            if bytes.is_empty() && byte.is_ascii_whitespace() {
                begin = self.line;
                continue;
            }
            match byte {
                _ if in_string => {
                    in_string = is_escaped || byte != b'"';
                    is_escaped = !is_escaped && byte == b'\\';
                }
                b'"' => in_string = true,
                b'[' | b'{' => depth += 1,
                b',' if depth == 0 => return Ok(Some((begin, bytes))),
                b']' | b'}' if depth > 0 => depth -= 1,
                b']' => {
                    self.state = State::Ended;
                    while let Some(byte) = self.byte()? {
                        if !byte.is_ascii_whitespace() {
                            return Err(ArrayError::Syntax(self.line));
                        }
                    }
                    return Ok(Some((begin, bytes)).filter(|(_, bytes)| !bytes.is_empty()));
                }
                _ => {}
            }
            if bytes.len() == MAX_DOCUMENT {
                return Err(ArrayError::TooLong(begin));
            }
            bytes.push(byte);
        }
    }
}

impl<R: BufRead> Iterator for JsonArray<R> {
    type Item = Result<(u64, Vec<u8>), ArrayError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Ended {
            return None;
        }
        let next = self.element();
        if next.is_err() {
            self.state = State::Ended;
        }
        next.transpose()
    }
}
