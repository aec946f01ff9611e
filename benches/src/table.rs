//! Tables of measurements, printed and as JSON.
use std::fmt;

use serde_json::Value;

/// Rows with a title. A row is an object, whose keys are the columns.
pub struct Table {
    title: String,
    /// Rows in print and in JSON.
    pub rows: Vec<Value>,
}

impl Table {
    /// Empty table with this title.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), rows: vec![] }
    }

    /// Table of these rows.
    pub fn of(title: impl Into<String>, rows: &[Value]) -> Self {
        Self { title: title.into(), rows: rows.to_vec() }
    }
}

/// Text of a cell: four digits of a measured number, a dash for an absent value, `2x3` for a shape.
fn text(cell: &Value) -> String {
    match cell {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join("x"),
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or(f64::NAN);
            let decimals = (3.0 - number.abs().log10().floor()).clamp(0.0, 4.0) as usize;
            format!("{number:.decimals$}")
        }
        other => other.to_string(),
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<_> =
            self.rows.iter().filter_map(Value::as_object).take(1).flat_map(|row| row.keys()).collect();
        let cells = self.rows.iter().map(|row| columns.iter().map(|column| text(&row[*column])).collect());
        let lines: Vec<Vec<_>> = [columns.iter().map(ToString::to_string).collect()].into_iter().chain(cells).collect();
        let width = |i: usize| lines.iter().map(|line| line[i].len()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns.len()).map(width).collect();
        writeln!(f, "\n{}", self.title)?;
        for line in lines {
            let cells: Vec<_> = line.iter().zip(&widths).map(|(text, width)| format!("{text:>width$}")).collect();
            writeln!(f, "{}", cells.join("  "))?;
        }
        Ok(())
    }
}
