//! [`ProfileTable`]: breakdown of a window's time, as text and as JSON.

use std::fmt;
use std::ops::RangeInclusive;

use serde::Serialize;

use super::Spent;
use super::kernels::Kind;

/// Rows of [`Kind::Other`] below this fraction of the work are folded into one in text.
const SMALL: f64 = 0.005;

/// Method of timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Timing {
    /// Between a kernel's timestamps on the device.
    Timestamps,
    /// On the host, from before a kernel's launch until the device has finished it. Includes launch
    /// and synchronization, and compilation at the first launch.
    Synchronized,
    /// Duration of a call that computes on the host.
    Call,
}

impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timestamps => "between a kernel's timestamps on the device",
            Self::Synchronized => "on the host, from a kernel's launch until the device has finished it",
            Self::Call => "of each call, on the host",
        })
    }
}

/// Time of a kernel or operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileRow {
    /// Name of the kernel or operation. Variants of a kernel with other types and settings are
    /// combined.
    pub name: String,
    /// Kind.
    pub kind: Kind,
    /// Number of calls in the window; 0 for [`Kind::Host`].
    pub calls: u64,
    /// Total seconds.
    pub seconds: f64,
    /// Fraction of the window's wall time.
    pub share: f64,
    /// Fraction of the sum of all rows except [`Kind::Host`], which has 0. On a GPU this is closer
    /// to an unprofiled run, because waiting for each kernel increases the wall time.
    pub work_share: f64,
}

/// Breakdown of the time of a window's steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileTable {
    /// The device.
    pub device: String,
    /// Method of timing.
    pub timing: Timing,
    /// First step, counted from 1.
    pub first_step: usize,
    /// Number of steps in the window.
    pub steps: usize,
    /// Wall time of the window, between two synchronizations with the device.
    pub wall_seconds: f64,
    /// Rows by decreasing time, then [`Kind::Host`]: wall time minus the sum of the others. It is
    /// at least 0, because concurrent work counts several times.
    pub rows: Vec<ProfileRow>,
}

impl ProfileTable {
    pub(super) fn new(
        device: String,
        timing: Timing,
        steps: RangeInclusive<usize>,
        wall_seconds: f64,
        spent: Vec<Spent>,
    ) -> Self {
        let work: f64 = spent.iter().map(|spent| spent.seconds).sum();
        let row = |Spent { name, kind, calls, seconds }| {
            let work_share = if kind == Kind::Host || work == 0.0 { 0.0 } else { seconds / work };
            ProfileRow { name, kind, calls, seconds, share: seconds / wall_seconds, work_share }
        };
        let mut rows: Vec<_> = spent.into_iter().map(row).collect();
        rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        let (name, seconds) = ("host".into(), (wall_seconds - work).max(0.0));
        rows.push(row(Spent { name, kind: Kind::Host, calls: 0, seconds }));
        let (first_step, steps) = (*steps.start(), steps.count());
        Self { device, timing, first_step, steps, wall_seconds, rows }
    }

    /// Sum of `share` over the rows of a kind.
    pub fn share(&self, kind: Kind) -> f64 {
        self.rows.iter().filter(|row| row.kind == kind).map(|row| row.share).sum()
    }

    /// Sum of `work_share` over the rows of a kind.
    pub fn work_share(&self, kind: Kind) -> f64 {
        self.rows.iter().filter(|row| row.kind == kind).map(|row| row.work_share).sum()
    }
}

/// Header, aligned rows, and the sum of each kind. Rows of [`Kind::Other`] with less than 0.5 % of
/// the work are folded into one.
impl fmt::Display for ProfileTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, timing, first_step, steps, wall_seconds, rows } = self;
        let last = first_step + steps - 1;
        writeln!(
            f,
            "profile: steps {first_step} to {last} on {device}, {:.1} ms a step",
            1e3 * wall_seconds / *steps as f64
        )?;
        writeln!(f, "time: {timing}; host: step time in no other row; of work: share without host")?;
        let (small, shown): (Vec<_>, Vec<_>) =
            rows.iter().cloned().partition(|row| row.kind == Kind::Other && row.work_share < SMALL);
        let mut shown = shown;
        if !small.is_empty() {
            let folded = ProfileRow {
                name: format!("others ({} kernels)", small.len()),
                kind: Kind::Other,
                calls: small.iter().map(|row| row.calls).sum(),
                seconds: small.iter().map(|row| row.seconds).sum(),
                share: small.iter().map(|row| row.share).sum(),
                work_share: small.iter().map(|row| row.work_share).sum(),
            };
            shown.insert(shown.len() - 1, folded);
        }
        writeln!(f, "{:>7}  {:>7}  {:>12}  {:>8}  {:<11}  name", "of wall", "of work", "time", "calls", "kind")?;
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        for ProfileRow { name, kind, calls, seconds, share, work_share } in &shown {
            let (work, calls) = match kind {
                Kind::Host => Default::default(),
                _ => (percent(*work_share), calls.to_string()),
            };
            let wall = percent(*share);
            writeln!(f, "{wall:>7}  {work:>7}  {:>9.3} ms  {calls:>8}  {kind:<11}  {name}", 1e3 * seconds)?;
        }
        write!(f, "sum of wall:")?;
        let has = |kind| rows.iter().any(|row| row.kind == kind);
        for kind in Kind::ALL.into_iter().filter(|kind| has(*kind)) {
            write!(f, "  {kind} {}", percent(self.share(kind)))?;
        }
        write!(f, "\nsum of work:")?;
        for kind in Kind::ALL.into_iter().filter(|kind| has(*kind) && *kind != Kind::Host) {
            write!(f, "  {kind} {}", percent(self.work_share(kind)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> ProfileTable {
        let spent = |name: &str, kind, calls, seconds| Spent { name: name.into(), kind, calls, seconds };
        let spent = vec![
            spent("tiny", Kind::Other, 3, 0.0015),
            spent("cast_tiles", Kind::Cast, 7, 0.001),
            spent("gemm_mma", Kind::ScaledGemm, 9, 0.3),
            spent("minute", Kind::Other, 2, 0.0005),
            spent("Matmul", Kind::Other, 1, 0.097),
            spent("Reduce", Kind::Other, 5, 0.1),
        ];
        ProfileTable::new("cuda".into(), Timing::Synchronized, 3..=4, 1.0, spent)
    }

    #[test]
    fn rows_are_aligned_and_small_others_folded() {
        let expected = "\
profile: steps 3 to 4 on cuda, 500.0 ms a step
time: on the host, from a kernel's launch until the device has finished it; host: step time in no other row; of work: share without host
of wall  of work          time     calls  kind         name
 30.0 %   60.0 %    300.000 ms         9  scaled GEMM  gemm_mma
 10.0 %   20.0 %    100.000 ms         5  other        Reduce
  9.7 %   19.4 %     97.000 ms         1  other        Matmul
  0.1 %    0.2 %      1.000 ms         7  cast         cast_tiles
  0.2 %    0.4 %      2.000 ms         5  other        others (2 kernels)
 50.0 %             500.000 ms            host         host
sum of wall:  cast 0.1 %  scaled GEMM 30.0 %  other 19.9 %  host 50.0 %
sum of work:  cast 0.2 %  scaled GEMM 60.0 %  other 39.8 %";
        assert_eq!(table().to_string(), expected);
    }

    #[test]
    fn shares_sum_to_one_unless_work_overlaps() {
        let table = table();
        let sum: f64 = Kind::ALL.into_iter().map(|kind| table.share(kind)).sum();
        assert!((sum - 1.0).abs() < 1e-12, "{sum}");
        let sum: f64 = table.rows.iter().map(|row| row.work_share).sum();
        assert!((sum - 1.0).abs() < 1e-12, "{sum}");
        let idle = ProfileTable::new("cpu".into(), Timing::Call, 1..=1, 2.0, vec![]);
        assert_eq!((idle.share(Kind::Host), idle.work_share(Kind::Host)), (1.0, 0.0));
        let spent = vec![Spent { name: "a".into(), kind: Kind::Other, calls: 1, seconds: 3.0 }];
        let overlaps = ProfileTable::new("cpu".into(), Timing::Call, 1..=1, 2.0, spent);
        assert_eq!((overlaps.share(Kind::Other), overlaps.share(Kind::Host)), (1.5, 0.0));
    }

    #[test]
    fn json_has_every_row() {
        let json = serde_json::to_value(table()).unwrap();
        assert_eq!(
            (&json["first_step"], &json["steps"], &json["timing"]),
            (&3.into(), &2.into(), &"synchronized".into())
        );
        assert_eq!(json["rows"].as_array().unwrap().len(), 7);
        let row = &json["rows"][0];
        assert_eq!((&row["name"], &row["kind"], &row["calls"]), (&"gemm_mma".into(), &"scaled_gemm".into(), &9.into()));
    }
}
