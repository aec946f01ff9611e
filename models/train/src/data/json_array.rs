//! Reads the elements of a JSON array from a file, one at a time.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::ops::ControlFlow;

use serde::Deserialize as _;
use serde::de::{DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::error::Category;

use super::error::MAX_DOCUMENT;

/// Why there is no next element. Numbers are lines, from 1.
pub(super) enum ArrayError {
    Io(io::Error),
    /// The element that begins here is longer than [`MAX_DOCUMENT`] bytes.
    TooLong(u64),
    /// The file ends before the array does.
    Cut(u64),
    /// The file is not an array, or something follows the array.
    NotAnArray(u64),
    Syntax(serde_json::Error),
}

/// Reads each element of the array that fills a file, until `take` breaks. `take` receives the line
/// on which the element begins, its value and its length in bytes.
pub(super) fn each(
    mut reader: impl BufRead,
    take: impl FnMut(u64, Value, u64) -> ControlFlow<()>,
) -> Result<(), ArrayError> {
    let place = Place { line: Cell::new(1), begin: Cell::new(1), bytes: Cell::new(0), is_enough: Cell::new(false) };
    // Skips a byte order mark.
    while reader.fill_buf().map_err(ArrayError::Io)?.first().is_some_and(|byte| [0xef, 0xbb, 0xbf].contains(byte)) {
        reader.consume(1);
    }
    let mut json = serde_json::Deserializer::from_reader(Counted { reader, place: &place });
    let read = json.deserialize_seq(Elements { take, place: &place });
    if place.is_enough.get() {
        return Ok(());
    }
    read.map_err(|error| match error.classify() {
        Category::Io if place.bytes.get() > MAX_DOCUMENT as u64 => ArrayError::TooLong(place.begin.get()),
        Category::Io => ArrayError::Io(error.into()),
        Category::Eof => ArrayError::Cut(error.line() as u64),
        Category::Data => ArrayError::NotAnArray(error.line() as u64),
        Category::Syntax => ArrayError::Syntax(error),
    })?;
    place.bytes.set(0);
    json.end().map_err(|error| ArrayError::NotAnArray(error.line() as u64))
}

/// Line of the reader, and line on which the element began.
struct Place {
    line: Cell<u64>,
    begin: Cell<u64>,
    /// Bytes of the element so far.
    bytes: Cell<u64>,
    /// Whether `take` has stopped.
    is_enough: Cell<bool>,
}

struct Counted<'a, R> {
    reader: R,
    place: &'a Place,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        let lines = buffer[..read].iter().filter(|byte| **byte == b'\n').count() as u64;
        self.place.line.update(|line| line + lines);
        self.place.bytes.update(|bytes| bytes + read as u64);
        if self.place.bytes.get() > MAX_DOCUMENT as u64 { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(read) }
    }
}

struct Elements<'a, F> {
    take: F,
    place: &'a Place,
}

impl<'de, F: FnMut(u64, Value, u64) -> ControlFlow<()>> Visitor<'de> for Elements<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element_seed(Element(self.place))? {
            if (self.take)(self.place.begin.get(), value, self.place.bytes.get()).is_break() {
                self.place.is_enough.set(true);
                break;
            }
        }
        Ok(())
    }
}

/// Deserializes an element. The first byte of the element has already been read.
struct Element<'a>(&'a Place);

impl<'de> DeserializeSeed<'de> for Element<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.begin.set(self.0.line.get());
        self.0.bytes.set(1);
        Value::deserialize(deserializer)
    }
}
