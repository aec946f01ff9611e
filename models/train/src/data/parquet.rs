//! Rows of a Parquet file: the columns that hold documents, page by page.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::encode::{Content, Work};
use super::error::cannot_read;
use super::scan::Scanned;
use super::{DataError, DocumentError};

/// The rows of a file until their texts have as many bytes as are taken.
pub(super) fn read_rows<'a>(
    file: &'a Scanned,
    field: &str,
) -> Result<impl Iterator<Item = Result<Work<'a>, DataError>>, DataError> {
    let path: &Path = &file.path;
    let broken = |error: ParquetError| DataError::Parquet { path: path.into(), reason: error.to_string() };
    let input = File::open(path).map_err(cannot_read(path))?;
    let reader = without_panic(|| SerializedFileReader::new(input)).map_err(broken)?;
    let schema = reader.metadata().file_metadata().schema();
    let name = if schema.get_fields().iter().any(|column| column.name() == field) { field } else { "messages" };
    let column: Vec<Arc<Type>> = schema.get_fields().iter().filter(|column| column.name() == name).cloned().collect();
    if column.is_empty() {
        let found = schema.get_fields().iter().map(|column| format!("`{}`", column.name())).collect();
        let problem = DocumentError::Missing { field: field.into(), found };
        return Err(DataError::Row { path: path.into(), row: 1, problem });
    }
    if column.iter().any(|column| is_bytes(column)) {
        let problem = DocumentError::Type { field: name.into(), found: "bytes", expected: "text" };
        return Err(DataError::Row { path: path.into(), row: 1, problem });
    }
    let columns = Type::group_type_builder(schema.name()).with_fields(column).build().map_err(broken)?;
    let mut rows = RowIter::from_file_into(Box::new(reader)).project(Some(columns)).map_err(broken)?;
    let (mut row, mut left, mut failed) = (0, file.taken, false);
    Ok(std::iter::from_fn(move || {
        if failed || left == 0 {
            return None;
        }
        row += 1;
        let next = without_panic(|| rows.next().map(|row| row.map(|row| row.to_json_value())).transpose());
        let fields = match next.transpose()? {
            Ok(fields) => fields,
            Err(error) => {
                failed = true;
                return Some(Err(broken(error)));
            }
        };
        let Value::Object(mut fields) = fields else { return None };
        fields.values_mut().for_each(remove_nulls);
        let bytes = text_bytes(&fields).min(left);
        left -= bytes;
        Some(Ok(Work { file, content: Content::Row { row, fields }, bytes }))
    }))
}

/// The reader of records panics where a file contradicts itself.
fn without_panic<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        Err(ParquetError::General(text.unwrap_or_else(|| "it contradicts itself".into())))
    })
}

/// Bytes that are not said to be text, which as JSON would become base64.
fn is_bytes(column: &Type) -> bool {
    column.is_primitive()
        && column.get_physical_type() == PhysicalType::BYTE_ARRAY
        && column.get_basic_info().converted_type() == ConvertedType::NONE
        && column.get_basic_info().logical_type_ref().is_none()
}

/// A column has a value in every row; a key that a message does not have is null there.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(remove_nulls),
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_nulls);
        }
        _ => {}
    }
}

fn text_bytes(fields: &Map<String, Value>) -> u64 {
    fn of(value: &Value) -> u64 {
        match value {
            Value::String(text) => text.len() as u64,
            Value::Array(values) => values.iter().map(of).sum(),
            Value::Object(map) => map.values().map(of).sum(),
            _ => 0,
        }
    }
    fields.values().map(of).sum()
}
