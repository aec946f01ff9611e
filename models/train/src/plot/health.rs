//! FP8 statistics of a run by layer and sampled step, for its heat map.

use std::collections::{BTreeMap, BTreeSet};

use crate::metrics::Record;

use super::series::quantile;

/// Thresholds, as fractions of an operand's elements, beyond which its layer is marked.
pub(super) const MAX_SATURATED: f64 = 0.001;
pub(super) const MAX_FLUSHED: f64 = 0.01;

/// Maximum rows, columns and cells; more are merged.
const MAX_ROWS: usize = 800;
const MAX_COLUMNS: usize = 400;
const MAX_CELLS: usize = 20_000;

/// Samples of a run, with layers as rows and steps as columns.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// First layer of each row. Layers are sorted by name, numbers in names by value.
    pub layers: Vec<String>,
    /// First sampled step of each column.
    pub steps: Vec<usize>,
    /// Number of layers merged in a row, and of samples in a column. The worst one counts.
    pub merged: (usize, usize),
    /// Smallest SQNR of an operand in dB, by row and column; `None` if all operands were zero. Some
    /// layers lack some samples.
    pub samples: BTreeMap<(usize, usize), Option<f64>>,
    /// By row: whether an operand of any sample had too many saturated elements, too many flushed
    /// to zero, or any inf or NaN.
    pub marks: Vec<[bool; 3]>,
}

impl Health {
    pub(super) fn new(records: &[Record]) -> Self {
        let samples = || {
            records.iter().flat_map(|record| {
                let layers = record.health.iter();
                let operands =
                    layers.flat_map(|(name, operands)| operands.values().map(move |operand| (name, operand)));
                // A sample without a step has the step of its line.
                operands
                    .map(|(name, operand)| (name, if operand.step > 0 { operand.step } else { record.step }, operand))
            })
        };
        let layers: BTreeMap<_, _> = samples().map(|(name, ..)| (natural(name), name)).collect();
        let steps: BTreeSet<_> = samples().map(|(_, step, _)| step).collect();
        if layers.is_empty() {
            return Self::default();
        }
        let in_row = layers.len().div_ceil(MAX_ROWS);
        let rows = layers.len().div_ceil(in_row);
        let in_column = steps.len().div_ceil(MAX_COLUMNS.min(MAX_CELLS / rows));
        let mut health = Self {
            layers: layers.values().step_by(in_row).map(|name| (*name).clone()).collect(),
            steps: steps.iter().step_by(in_column).copied().collect(),
            merged: (in_row, in_column),
            samples: BTreeMap::new(),
            marks: vec![[false; 3]; rows],
        };
        let row_of: BTreeMap<_, _> = layers.into_values().zip((0..).map(|layer: usize| layer / in_row)).collect();
        for (name, step, operand) in samples() {
            let (row, column) = (row_of[name], health.steps.partition_point(|first| *first <= step) - 1);
            let db = operand.sqnr_db.filter(|db| !db.is_nan());
            let worst = health.samples.entry((row, column)).or_default();
            *worst = [*worst, db].into_iter().flatten().min_by(f64::total_cmp);
            let now = [operand.saturated > MAX_SATURATED, operand.flushed > MAX_FLUSHED, operand.non_finite > 0];
            (0..3).for_each(|kind| health.marks[row][kind] |= now[kind]);
        }
        health
    }
}

/// Range of the colours, in whole dB. Outliers are ignored.
pub(super) fn db_range<'a>(runs: impl IntoIterator<Item = &'a Health>) -> (f64, f64) {
    let all = runs.into_iter().flat_map(|health| health.samples.values().flatten());
    let all: Vec<_> = all.copied().filter(|db| db.abs() < 1e4).collect();
    let of = |q| quantile(all.iter().copied(), q);
    let (Some(low), Some(middle), Some(high)) = (of(0.0), of(0.5), of(1.0)) else { return (0.0, 40.0) };
    let (low, high) = (low.max(middle - 30.0).floor(), high.min(middle + 15.0).ceil());
    if high - low < 2.0 { (low - 1.0, high + 1.0) } else { (low, high) }
}

/// Sort key that orders `layers.10` after `layers.2`: a number is compared by its number of digits,
/// then by its digits.
fn natural(name: &str) -> Vec<(usize, String)> {
    let mut parts: Vec<(usize, String)> = vec![];
    for letter in name.chars() {
        match parts.last_mut() {
            Some((digits, part)) if letter.is_ascii_digit() && *digits > 0 => {
                part.push(letter);
                *digits += 1;
            }
            _ => parts.push((usize::from(letter.is_ascii_digit()), letter.into())),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::HealthRecord;

    fn record(step: usize, layers: &[(&str, &[HealthRecord])]) -> Record {
        let operands =
            |all: &[HealthRecord]| all.iter().enumerate().map(|(i, health)| (i.to_string(), *health)).collect();
        let health = layers.iter().map(|(name, all)| ((*name).to_owned(), operands(all))).collect();
        Record { step, health, ..Default::default() }
    }

    fn db(step: usize, sqnr_db: Option<f64>) -> HealthRecord {
        HealthRecord { step, sqnr_db, ..Default::default() }
    }

    #[test]
    fn the_worst_operand_counts() {
        let saturated = HealthRecord { saturated: 0.002, ..db(4, Some(9.0)) };
        let records = [
            record(5, &[("l.10", &[db(4, Some(30.0)), saturated]), ("l.2", &[db(4, None)])]),
            record(9, &[("a", &[db(8, Some(f64::INFINITY))]), ("l.2", &[db(8, None), db(8, Some(7.0))])]),
        ];
        let health = Health::new(&records);
        assert_eq!(health.layers, ["a", "l.2", "l.10"]);
        assert_eq!(health.steps, [4, 8]);
        let infinite = ((0, 1), Some(f64::INFINITY));
        let expected = [infinite, ((1, 0), None), ((1, 1), Some(7.0)), ((2, 0), Some(9.0))];
        assert_eq!(health.samples, BTreeMap::from(expected));
        assert_eq!(health.marks, [[false; 3], [false; 3], [true, false, false]]);
        assert_eq!(db_range([&health]), (7.0, 9.0));
        assert_eq!(db_range([&Health::default()]), (0.0, 40.0));
    }

    #[test]
    fn many_layers_and_samples_are_merged() {
        let names: Vec<_> = (0..1001).map(|layer| format!("l.{layer}")).collect();
        let at = |step| move |name: &String| (name.clone(), db(step, Some(if step == 43 { 5.0 } else { 9.0 })));
        let line = |step: usize| -> Record {
            let health =
                names.iter().map(at(step)).map(|(name, operand)| (name, BTreeMap::from([("0".into(), operand)])));
            Record { step, health: health.collect(), ..Default::default() }
        };
        let health = Health::new(&(1..=100).map(line).collect::<Vec<_>>());
        assert_eq!(health.merged, (2, 3));
        assert_eq!((health.layers.len(), &*health.layers[500], health.steps.len()), (501, "l.1000", 34));
        assert_eq!((health.samples[&(500, 14)], health.samples[&(500, 15)]), (Some(5.0), Some(9.0)));
    }
}
