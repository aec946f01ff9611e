//! Rows of a Parquet file in any supported compression. Only the columns that hold documents are
//! read, a few rows at a time.

use std::path::Path;
use std::sync::Arc;

use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::error::{MAX_DOCUMENT, cannot_read};
use super::{DataError, DocumentError, KWARGS, MESSAGES, THINKING, TOOLS};
use crate::files;
use crate::panics::caught;

/// Bytes of values to read ahead, by the average size of a row.
const AHEAD: u64 = 1 << 20;

/// Columns that are read in addition to messages.
const BESIDE: [&str; 3] = [TOOLS, KWARGS, THINKING];

/// Bytes of text in a file's rows, at most `limit`.
pub(super) fn text_bytes(path: &Path, field: &str, limit: u64) -> Result<u64, DataError> {
    let mut bytes = 0_u64;
    for row in Rows::open(path, field)? {
        bytes = bytes.saturating_add(row?.bytes);
        if bytes >= limit {
            return Ok(limit);
        }
    }
    Ok(bytes)
}

/// Values of a row in the columns that are read.
pub(super) struct Row {
    /// Row number, from 1.
    pub(super) row: u64,
    pub(super) fields: Map<String, Value>,
    /// Bytes of its text, at least 1, so that a row without text counts.
    pub(super) bytes: u64,
}

/// Iterator over the rows of a file.
pub(super) struct Rows<'a> {
    path: &'a Path,
    rows: RowIter<'static>,
    row: u64,
    failed: bool,
}

impl<'a> Rows<'a> {
    /// Opens a file. Its columns are read like the fields of a JSON line.
    pub(super) fn open(path: &'a Path, field: &str) -> Result<Self, DataError> {
        let broken = broken(path);
        let input = files::open(path).map_err(cannot_read(path))?;
        let reader = without_panic(|| SerializedFileReader::new(input)).map_err(&broken)?;
        let schema = reader.metadata().file_metadata().schema();
        let is_read =
            |column: &&Arc<Type>| [field, MESSAGES].contains(&column.name()) || BESIDE.contains(&column.name());
        let columns: Vec<Arc<Type>> = schema.get_fields().iter().filter(is_read).cloned().collect();
        if columns.iter().all(|column| BESIDE.contains(&column.name())) {
            let found = schema.get_fields().iter().map(|column| format!("`{}`", column.name())).collect();
            let problem = DocumentError::Missing { field: field.into(), found };
            return Err(DataError::Row { path: path.into(), row: 1, problem });
        }
        if let Some(column) = columns.iter().find(|column| is_bytes(column)) {
            let problem = DocumentError::Type { field: column.name().into(), found: "bytes", expected: "text" };
            return Err(DataError::Row { path: path.into(), row: 1, problem });
        }
        let ahead = rows_ahead(reader.metadata(), &columns);
        let columns = Type::group_type_builder(schema.name()).with_fields(columns).build().map_err(&broken)?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(Some(columns)).map_err(&broken)?;
        Ok(Self { path, rows: rows.with_batch_size(ahead), row: 0, failed: false })
    }
}

impl Iterator for Rows<'_> {
    type Item = Result<Row, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        self.row += 1;
        let row = self.row;
        let next = without_panic(|| self.rows.next().transpose());
        let columns = match next.transpose()? {
            Ok(columns) => columns.into_columns(),
            Err(error) => {
                self.failed = true;
                return Some(Err(broken(self.path)(error)));
            }
        };
        let value = |field| match field {
            Field::Str(text) => Value::String(text),
            field => without_nulls(field.to_json_value()),
        };
        let fields: Map<_, _> = columns.into_iter().map(|(name, field)| (name, value(field))).collect();
        let bytes = fields.values().map(bytes_of).sum::<u64>().max(1);
        if bytes > MAX_DOCUMENT as u64 {
            let problem = DocumentError::TooLong { limit: MAX_DOCUMENT };
            return Some(Err(DataError::Row { path: self.path.into(), row, problem }));
        }
        Some(Ok(Row { row, fields, bytes }))
    }
}

/// Number of rows to read at once. Each may be in a separate page, which stays in memory until
/// then.
fn rows_ahead(metadata: &ParquetMetaData, columns: &[Arc<Type>]) -> usize {
    let is_read = |chunk: &&ColumnChunkMetaData| {
        chunk.column_path().parts().first().is_some_and(|name| columns.iter().any(|column| column.name() == name))
    };
    let of_group = |group: &RowGroupMetaData| {
        let bytes: u64 =
            group.columns().iter().filter(is_read).map(|chunk| chunk.uncompressed_size().max(0) as u64).sum();
        AHEAD / bytes.checked_div(group.num_rows().max(0) as u64).unwrap_or(0).max(1)
    };
    metadata.row_groups().iter().map(of_group).min().unwrap_or(1).clamp(1, 64) as usize
}

fn broken(path: &Path) -> impl Fn(ParquetError) -> DataError + '_ {
    |error| DataError::Parquet { path: path.into(), reason: error.to_string() }
}

/// Converts panics to errors: the record reader panics on inconsistent files.
fn without_panic<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    caught(read).unwrap_or_else(|text| Err(ParquetError::General(text)))
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
