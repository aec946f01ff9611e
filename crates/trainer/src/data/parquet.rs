//! Rows of a Parquet file in any supported compression. Only the columns that hold documents are
//! read, a few rows at a time.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::{KWARGS, MAX_DOCUMENT, MESSAGES, THINKING, TOOLS, cannot_read, missing};
use crate::files;
use crate::panics::caught;

/// Rows read at once. Each may be in a separate page, which stays in memory until then.
const AHEAD: usize = 16;

/// Columns that are read in addition to messages.
const BESIDE: [&str; 3] = [TOOLS, KWARGS, THINKING];

/// Values of a row in the columns that are read.
pub(super) struct Row {
    /// Row number, from 1.
    pub(super) row: u64,
    pub(super) fields: Map<String, Value>,
    /// Bytes of its text, at least 1, so that a row without text counts.
    pub(super) bytes: u64,
}

/// Iterator over the rows of a file. It ends at the first error.
pub(super) struct Rows<'a> {
    path: &'a Path,
    rows: RowIter<'static>,
    row: u64,
}

impl<'a> Rows<'a> {
    /// Opens a file. Its columns are read like the fields of a JSON line.
    pub(super) fn open(path: &'a Path, field: &str) -> Result<Self> {
        let input = files::open(path).with_context(cannot_read(path))?;
        let reader = or_broken(path, || SerializedFileReader::new(input))?;
        let schema = reader.metadata().file_metadata().schema();
        let is_read =
            |column: &&Arc<Type>| [field, MESSAGES].contains(&column.name()) || BESIDE.contains(&column.name());
        let columns: Vec<Arc<Type>> = schema.get_fields().iter().filter(is_read).cloned().collect();
        let first_row = || format!("{}, row 1", path.display());
        if columns.iter().all(|column| BESIDE.contains(&column.name())) {
            bail!("{}: {}", first_row(), missing(field, schema.get_fields().iter().map(|column| column.name())));
        }
        if let Some(column) = columns.iter().find(|column| is_bytes(column)) {
            bail!("{}: `{}` is bytes, expected text", first_row(), column.name());
        }
        let columns = or_broken(path, || Type::group_type_builder(schema.name()).with_fields(columns).build())?;
        let rows = or_broken(path, || RowIter::from_file_into(Box::new(reader)).project(Some(columns)))?;
        Ok(Self { path, rows: rows.with_batch_size(AHEAD), row: 0 })
    }

    fn read(&mut self) -> Result<Option<Row>> {
        let Some(columns) = or_broken(self.path, || self.rows.next().transpose())? else { return Ok(None) };
        self.row += 1;
        let value = |field| match field {
            Field::Str(text) => Value::String(text),
            field => without_nulls(field.to_json_value()),
        };
        let fields: Map<_, _> = columns.into_columns().into_iter().map(|(name, field)| (name, value(field))).collect();
        let (row, bytes) = (self.row, fields.values().map(bytes_of).sum::<u64>().max(1));
        ensure!(bytes <= MAX_DOCUMENT as u64, "{}, row {row}: longer than {MAX_DOCUMENT} bytes", self.path.display());
        Ok(Some(Row { row, fields, bytes }))
    }
}

impl Iterator for Rows<'_> {
    type Item = Result<Row>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// Converts errors and panics: the record reader panics on inconsistent files.
fn or_broken<T>(path: &Path, read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T> {
    let result = caught(read).unwrap_or_else(|text| Err(ParquetError::General(text)));
    result.map_err(|error| anyhow!("{} cannot be read as Parquet: {error}", path.display()))
}

/// Whether a column holds bytes that are not declared as text. In JSON they would become base64.
fn is_bytes(column: &Type) -> bool {
    column.is_primitive()
        && column.get_physical_type() == PhysicalType::BYTE_ARRAY
        && column.get_basic_info().converted_type() == ConvertedType::NONE
        && column.get_basic_info().logical_type_ref().is_none()
}

/// Removes nulls. A column has a value in every row, and a key that a message lacks is null there.
fn without_nulls(mut value: Value) -> Value {
    match &mut value {
        Value::Array(values) => values.iter_mut().for_each(|value| *value = without_nulls(value.take())),
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(|value| *value = without_nulls(value.take()));
        }
        _ => {}
    }
    value
}

fn bytes_of(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len() as u64,
        Value::Array(values) => values.iter().map(bytes_of).sum(),
        Value::Object(map) => map.values().map(bytes_of).sum(),
        _ => 0,
    }
}
