//! Tables of the parts, printed and as JSON.
use std::fmt;

use serde_json::{Value, json};

/// Table of a part.
pub struct Table {
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

/// Value of a row in a column.
pub enum Cell {
    /// A name or a count.
    Text(String),
    /// A measured number, and its decimals in print.
    Number(f64, usize),
}

impl<T: fmt::Display> From<T> for Cell {
    fn from(value: T) -> Self {
        Self::Text(value.to_string())
    }
}

/// A number with two decimals.
pub fn number(value: f64) -> Cell {
    Cell::Number(value, 2)
}

/// Mebibytes.
pub fn mib(bytes: usize) -> Cell {
    number(bytes as f64 / f64::from(1 << 20))
}

/// Cell of a value that may be absent.
pub fn optional(value: Option<Cell>) -> Cell {
    value.unwrap_or_else(|| Cell::Text(String::new()))
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number, decimals) => format!("{number:.decimals$}"),
        }
    }
}

impl Table {
    /// A table with this title and these columns.
    pub fn new(title: impl Into<String>, columns: &[&'static str]) -> Self {
        Self { title: title.into(), columns: columns.to_vec(), rows: vec![] }
    }

    /// Adds a row with a cell for each column.
    pub fn row<const N: usize>(&mut self, cells: [Cell; N]) {
        assert_eq!(N, self.columns.len(), "{}", self.title);
        self.rows.push(cells.into());
    }

    /// Rows as objects.
    pub fn json(&self) -> Value {
        let value = |cell: &Cell| match cell {
            Cell::Text(text) => json!(text),
            Cell::Number(number, _) => json!(number),
        };
        let row = |cells: &Vec<Cell>| -> Value {
            self.columns.iter().zip(cells).map(|(column, cell)| (column.to_string(), value(cell))).collect()
        };
        self.rows.iter().map(row).collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<Vec<_>> = self.rows.iter().map(|row| row.iter().map(Cell::text).collect()).collect();
        let width = |i: usize| texts.iter().map(|row| row[i].len()).max().unwrap_or(0).max(self.columns[i].len());
        let widths: Vec<_> = (0..self.columns.len()).map(width).collect();
        writeln!(f, "\n{}", self.title)?;
        let columns = self.columns.iter().map(ToString::to_string).collect();
        for row in [columns].iter().chain(&texts) {
            let cells: Vec<_> = row.iter().zip(&widths).map(|(text, width)| format!("{text:>width$}")).collect();
            writeln!(f, "{}", cells.join("  "))?;
        }
        Ok(())
    }
}
