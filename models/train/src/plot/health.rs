//! FP8 statistics of a run by layer and sampled step: what its heat map shows.

use std::collections::BTreeMap;

use crate::metrics::{HealthRecord, Record};

use super::series::quantile;

/// Shares of an operand's elements, beyond which its layer is marked.
pub(super) const MAX_SATURATED: f64 = 0.001;
pub(super) const MAX_FLUSHED: f64 = 0.01;

/// How well a layer's operands were represented.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Quality {
    /// All were zero.
    Zero,
    /// The smallest SQNR, in dB.
    Db(f64),
}

impl Quality {
    fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Db(a), Self::Db(b)) => Self::Db(a.min(b)),
            (Self::Db(_), _) => self,
            (Self::Zero, _) => other,
        }
    }

    fn of(operand: &HealthRecord) -> Self {
        operand.sqnr_db.filter(|db| !db.is_nan()).map_or(Self::Zero, Self::Db)
    }
}

/// A run's samples.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Names, in the order in which they first appear; those of one line by name, numbers in names by their value.
    pub layers: Vec<String>,
    /// Sampled steps.
    pub steps: Vec<usize>,
    /// By layer and step, as indices. Not every layer has every sample.
    pub samples: BTreeMap<(usize, usize), Quality>,
    /// By layer, whether an operand of some sample had too many elements saturated, too many flushed to zero, any that was inf or
    /// NaN.
    pub marks: Vec<[bool; 3]>,
}

impl Health {
    pub(super) fn new(records: &[Record]) -> Self {
        let mut health = Self::default();
        let mut indices = BTreeMap::new();
        // A sample without a step of its own is of the step of its line.
        let step = |record: &Record, operand: &HealthRecord| if operand.step > 0 { operand.step } else { record.step };
        let all = |record: &Record| -> Vec<usize> {
            record.health.values().flat_map(|operands| operands.values().map(|operand| step(record, operand))).collect()
        };
        health.steps = records.iter().flat_map(all).collect();
        health.steps.sort_unstable();
        health.steps.dedup();
        for record in records {
            let mut layers: Vec<_> = record.health.iter().filter(|(_, operands)| !operands.is_empty()).collect();
            layers.sort_by_key(|(name, _)| natural(name));
            for (name, operands) in layers {
                let layer = *indices.entry(name).or_insert_with(|| {
                    health.layers.push(name.clone());
                    health.marks.push([false; 3]);
                    health.marks.len() - 1
                });
                for operand in operands.values() {
                    let column = health.steps.partition_point(|other| *other < step(record, operand));
                    let quality = health.samples.entry((layer, column)).or_insert(Quality::Zero);
                    *quality = quality.worse(Quality::of(operand));
                    let now =
                        [operand.saturated > MAX_SATURATED, operand.flushed > MAX_FLUSHED, operand.non_finite > 0];
                    let marks = &mut health.marks[layer];
                    (0..3).for_each(|kind| marks[kind] |= now[kind]);
                }
            }
        }
        health
    }

    /// With every `layers` rows and every `columns` columns as one, the worst of them.
    pub(super) fn merged(&self, layers: usize, columns: usize) -> Self {
        let mut merged = Self {
            layers: self.layers.iter().step_by(layers).cloned().collect(),
            steps: self.steps.iter().step_by(columns).copied().collect(),
            samples: BTreeMap::new(),
            marks: self
                .marks
                .chunks(layers)
                .map(|rows| [0, 1, 2].map(|kind| rows.iter().any(|row| row[kind])))
                .collect(),
        };
        for ((layer, column), quality) in &self.samples {
            let cell = merged.samples.entry((layer / layers, column / columns)).or_insert(Quality::Zero);
            *cell = cell.worse(*quality);
        }
        merged
    }
}

/// Whole dB that the colours reach from and to. Single values far from the others do not decide it.
pub(super) fn db_range<'a>(runs: impl IntoIterator<Item = &'a Health>) -> (f64, f64) {
    let db = |quality: &Quality| match quality {
        Quality::Db(db) if db.abs() < 1e4 => Some(*db),
        _ => None,
    };
    let all: Vec<_> = runs.into_iter().flat_map(|health| health.samples.values().filter_map(db)).collect();
    let of = |q| quantile(all.iter().copied(), q);
    let (Some(low), Some(middle), Some(high)) = (of(0.0), of(0.5), of(1.0)) else { return (0.0, 40.0) };
    let (low, high) = (low.max(middle - 30.0).floor(), high.min(middle + 15.0).ceil());
    if high - low < 2.0 { (low - 1.0, high + 1.0) } else { (low, high) }
}

/// Compares `layers.10` after `layers.2`: a number by how many digits it has, then by these.
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
        assert_eq!(health.layers, ["l.2", "l.10", "a"]);
        assert_eq!(health.steps, [4, 8]);
        let expected = [
            ((0, 0), Quality::Zero),
            ((0, 1), Quality::Db(7.0)),
            ((1, 0), Quality::Db(9.0)),
            ((2, 1), Quality::Db(f64::INFINITY)),
        ];
        assert_eq!(health.samples, BTreeMap::from(expected));
        assert_eq!(health.marks, [[false; 3], [true, false, false], [false; 3]]);
        assert_eq!(db_range([&health]), (7.0, 9.0));

        let merged = health.merged(2, 2);
        assert_eq!((merged.layers, merged.steps), (vec!["l.2".into(), "a".into()], vec![4]));
        assert_eq!(merged.samples[&(0, 0)], Quality::Db(7.0));
        assert_eq!(merged.marks, [[true, false, false], [false; 3]]);
        assert_eq!(db_range([&Health::default()]), (0.0, 40.0));
    }
}
