//! [`ProfileTable`]: breakdown of a window's time, as text and as JSON.

use std::fmt;

use serde::Serialize;

/// Rows of [`RowKind::Other`] below this fraction of the work are folded into one in text.
const SMALL: f64 = 0.005;

/// Kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// Separate amax kernels of casts.
    Amax,
    /// Casts to FP8.
    Cast,
    /// FP8 GEMMs.
    ScaledGemm,
    /// Everything else with a name.
    Other,
    /// Time not covered by any kernel or timed operation.
    Host,
}

impl RowKind {
    /// All kinds and their names, in the order of tables.
    const ALL: [(Self, &str); 5] = [
        (Self::Amax, "amax"),
        (Self::Cast, "cast"),
        (Self::ScaledGemm, "scaled GEMM"),
        (Self::Other, "other"),
        (Self::Host, "host"),
    ];
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Self::ALL[*self as usize].1)
    }
}

/// Beginnings or ends of the names of kernels and operations, and their kinds. Other names are
/// [`RowKind::Other`].
const KINDS: [(&str, RowKind); 13] = [
    ("Maxima", RowKind::Amax),
    ("Amax", RowKind::Amax),
    ("FoldLines", RowKind::Amax),
    ("CastLinear", RowKind::Cast),
    ("CastTiles", RowKind::Cast),
    ("CastRows", RowKind::Cast),
    ("cast ", RowKind::Cast),
    ("ScalesToE8m0", RowKind::Cast),
    ("TransposeCodes", RowKind::Cast),
    ("DequantizeF32", RowKind::Cast),
    ("Gemm", RowKind::ScaledGemm),
    ("Gemv", RowKind::ScaledGemm),
    ("scaled_gemm ", RowKind::ScaledGemm),
];

/// Time of a kernel or operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileRow {
    /// Name of the kernel or operation. Variants of a kernel with other types and settings are
    /// combined.
    pub name: String,
    /// Kind.
    pub kind: RowKind,
    /// Number of calls in the window; 0 for [`RowKind::Host`].
    pub calls: u64,
    /// Total seconds.
    pub seconds: f64,
}

impl ProfileRow {
    /// Row of a kernel or operation, whose name gives the kind.
    pub(super) fn new(name: String, calls: u64, seconds: f64) -> Self {
        let kind = KINDS.iter().find(|(part, _)| name.starts_with(part) || name.ends_with(part));
        Self { kind: kind.map_or(RowKind::Other, |(_, kind)| *kind), name, calls, seconds }
    }
}

/// Breakdown of the time of a window's steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProfileTable {
    /// The device.
    pub device: String,
    /// How the rows were timed, in words.
    pub timing: &'static str,
    /// First step, counted from 1.
    pub first_step: usize,
    /// Number of steps in the window.
    pub steps: usize,
    /// Wall time of the window, between two synchronizations with the device.
    pub wall_seconds: f64,
    /// Rows by decreasing time, then [`RowKind::Host`]: wall time minus the sum of the others. It is
    /// at least 0, because concurrent work counts several times.
    pub rows: Vec<ProfileRow>,
}

impl ProfileTable {
    /// Sorts the rows and adds the host's.
    pub(super) fn finish(mut self) -> Self {
        self.rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        let seconds = (self.wall_seconds - self.work()).max(0.0);
        self.rows.push(ProfileRow { name: "host".into(), kind: RowKind::Host, calls: 0, seconds });
        self
    }

    /// Sum of seconds over the rows of a kind.
    pub fn seconds(&self, kind: RowKind) -> f64 {
        self.rows.iter().filter(|row| row.kind == kind).map(|row| row.seconds).sum()
    }

    /// Sum of seconds over all rows but the host's.
    fn work(&self) -> f64 {
        self.rows.iter().filter(|row| row.kind != RowKind::Host).map(|row| row.seconds).sum()
    }
}

/// Header, aligned rows, and the sum of each kind. On a GPU the shares of the work are closer to an
/// unprofiled run, because waiting for each kernel increases the wall time.
impl fmt::Display for ProfileTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, timing, first_step, steps, wall_seconds, rows } = self;
        let (work, last, each) = (self.work(), first_step + steps - 1, 1e3 * wall_seconds / *steps as f64);
        writeln!(f, "profile: steps {first_step} to {last} on {device}, {each:.1} ms a step")?;
        writeln!(f, "time: {timing}; host: step time in no other row; of work: share without host")?;
        let is_small = |row: &ProfileRow| row.kind == RowKind::Other && row.seconds < SMALL * work;
        let (small, mut shown): (Vec<_>, Vec<_>) = rows.iter().cloned().partition(is_small);
        if !small.is_empty() {
            let (calls, seconds) = (small.iter().map(|row| row.calls).sum(), small.iter().map(|row| row.seconds).sum());
            let name = format!("others ({} kernels)", small.len());
            shown.insert(shown.len() - 1, ProfileRow { name, kind: RowKind::Other, calls, seconds });
        }
        writeln!(f, "{:>7}  {:>7}  {:>12}  {:>8}  {:<11}  name", "of wall", "of work", "time", "calls", "kind")?;
        let share = |seconds: f64, all: f64| format!("{:.1} %", 100.0 * seconds / all);
        for ProfileRow { name, kind, calls, seconds } in &shown {
            let (of_work, calls) = match kind {
                RowKind::Host => Default::default(),
                _ => (share(*seconds, work), calls.to_string()),
            };
            let wall = share(*seconds, *wall_seconds);
            writeln!(f, "{wall:>7}  {of_work:>7}  {:>9.3} ms  {calls:>8}  {kind:<11}  {name}", 1e3 * seconds)?;
        }
        let sums = |all: f64, kinds: &[(RowKind, &str)]| {
            let there = kinds.iter().filter(|(kind, _)| rows.iter().any(|row| row.kind == *kind));
            there.map(|(kind, name)| format!("  {name} {}", share(self.seconds(*kind), all))).collect::<String>()
        };
        write!(f, "sum of wall:{}\nsum of work:{}", sums(*wall_seconds, &RowKind::ALL), sums(work, &RowKind::ALL[..4]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(wall_seconds: f64) -> ProfileTable {
        let row = |name: &str, calls, seconds| ProfileRow::new(name.into(), calls, seconds);
        let rows = vec![
            row("tiny", 3, 0.0015),
            row("CastTiles", 7, 0.001),
            row("GemmMma", 9, 0.3),
            row("minute", 2, 0.0005),
            row("Matmul", 1, 0.097),
            row("Reduce", 5, 0.1),
        ];
        let timing = "of each call, on the host";
        ProfileTable { device: "cuda".into(), timing, first_step: 3, steps: 2, wall_seconds, rows }.finish()
    }

    #[test]
    fn rows_are_aligned_and_small_others_folded() {
        let expected = "\
profile: steps 3 to 4 on cuda, 500.0 ms a step
time: of each call, on the host; host: step time in no other row; of work: share without host
of wall  of work          time     calls  kind         name
 30.0 %   60.0 %    300.000 ms         9  scaled GEMM  GemmMma
 10.0 %   20.0 %    100.000 ms         5  other        Reduce
  9.7 %   19.4 %     97.000 ms         1  other        Matmul
  0.1 %    0.2 %      1.000 ms         7  cast         CastTiles
  0.2 %    0.4 %      2.000 ms         5  other        others (2 kernels)
 50.0 %             500.000 ms            host         host
sum of wall:  cast 0.1 %  scaled GEMM 30.0 %  other 19.9 %  host 50.0 %
sum of work:  cast 0.2 %  scaled GEMM 60.0 %  other 39.8 %";
        assert_eq!(table(1.0).to_string(), expected);
        assert_eq!(table(0.4).seconds(RowKind::Host), 0.0, "work that overlaps");
    }
}
