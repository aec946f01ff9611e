//! Results of `bench`: tables by part, with ratios to high precision and to torch.

use std::collections::BTreeMap;

use benches::table::Table;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Tables, in the order of their print, and whether they contain Burn's kernels.
const TABLES: [(&str, &str, bool); 9] = [
    ("quantize", "casts of bf16 to e4m3, and AdamW, as shares of a copy of the same bytes", false),
    ("beside", "forward + backward beside the linears", true),
    ("step", "Llama train step: forward, backward, AdamW", true),
    ("linear", "forward + backward of one linear, casts included; M x K x N", true),
    ("host", "host time: until the calls return, and until their work is done", true),
    (
        "gemm",
        "GEMM in TFLOP/s, M x N x K, FP8 e4m3 to the compute dtype; halves: 16-bit matrices; torch's best of all its FP8 modes",
        true,
    ),
    ("gemv", "GEMMs of a few rows: codes and scales of the weight in GB/s, and as a share of a copy", false),
    ("grouped", "grouped GEMM in TFLOP/s, FP8 e4m3 to the compute dtype; dense: a GEMM for each group", false),
    ("sweep", "GEMM in TFLOP/s by tile, cluster and most stages; plan.rs is what the library takes", false),
];

/// Smallest dimension of a GEMM in a mean.
const LARGE: u64 = 2048;

/// Geometric means: name, table, precision or scales of its rows, and the two columns of each ratio.
const MEANS: [(&str, &str, &str, [&str; 2]); 9] = [
    ("gemm_to_best", "gemm", "tensorwise", ["precise", "torch"]),
    ("fast_to_best", "gemm", "tensorwise", ["fast", "torch"]),
    ("gemm_to_bf16", "gemm", "tensorwise", ["precise", "torch_bf16"]),
    ("gemm_to_burn", "gemm", "tensorwise", ["precise", "burn"]),
    ("halves_to_bf16", "gemm", "tensorwise", ["halves", "torch_bf16"]),
    ("grouped_to_best", "grouped", "rowwise", ["precise", "torch"]),
    ("grouped_to_bf16", "grouped", "rowwise", ["precise", "torch_bf16"]),
    ("grouped_to_dense", "grouped", "rowwise", ["precise", "dense"]),
    ("linear_to_bf16", "linear", "tensorwise", ["torch_bf16", "milliseconds"]),
];

/// Results so far; parts that did not run are absent.
#[derive(Default, Serialize)]
pub struct Results {
    /// Whether Burn tuned its kernels for the shapes.
    autotune: bool,
    /// Rows by table.
    #[serde(flatten)]
    tables: BTreeMap<String, Vec<Value>>,
    /// Lines of the torch script.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub torch: Map<String, Value>,
    /// Geometric means of ratios over GEMMs with all dimensions of at least 2048, and linears.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    summary: BTreeMap<&'static str, f64>,
    /// Reasons for parts that this device does not support.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    absent: Vec<String>,
    /// Cases without a result, and reasons.
    pub skipped: Vec<String>,
}

impl Results {
    /// Adds the result of a case: a row of the table that the first word of its name names, or the
    /// reason why the device does not support the part.
    pub fn add(&mut self, case: &str, row: Value) {
        self.autotune = cfg!(feature = "autotune");
        if let Value::String(why) = row {
            return self.absent.push(why);
        }
        let table = case.split(' ').next().unwrap_or_default();
        self.tables.entry(table.into()).or_default().push(row);
        for (name, rows) in &mut self.tables {
            to_plain(rows);
            to_torch(rows, self.torch.get(name));
        }
        for (name, table, kind, columns) in MEANS {
            let rows = self.tables.get(table).into_iter().flatten();
            let rows = rows.filter(|row| row["scales"] == kind || row["precision"] == kind);
            let large = rows.filter(|row| table != "gemm" || sides(row).all(|side| side >= LARGE));
            let ratios: Vec<_> = large.filter_map(|row| ratio(&row[columns[0]], &row[columns[1]])).collect();
            if !ratios.is_empty() {
                let sum: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
                self.summary.insert(name, (sum / ratios.len() as f64).exp());
            }
        }
    }

    /// Prints all tables.
    pub fn print(&self) {
        if let [Some(version), Some(device)] = ["version", "device"].map(|name| self.torch.get(name)?.as_str()) {
            println!("\ntorch {version} on {device}");
        }
        for (name, title, with_burn) in TABLES {
            if let Some(rows) = self.tables.get(name) {
                let tuned = if self.autotune { "tuned" } else { "untuned" };
                let burn = if with_burn { format!("; Burn's kernels are {tuned}") } else { String::new() };
                print!("{}", Table::of(format!("{title}{burn}"), rows));
            }
        }
        if let Some(rate) = self.torch.get("copy_gb_per_s") {
            println!("\ntorch's copy: {rate} GB/s");
        }
        if !self.summary.is_empty() {
            println!("\ngeometric means, of GEMMs with all dimensions of at least {LARGE}, and of linears:");
        }
        for (name, mean) in &self.summary {
            println!("{}: {mean:.3}", name.replace('_', " "));
        }
        for absent in &self.absent {
            println!("not on this device: {absent}");
        }
        for skipped in &self.skipped {
            println!("skipped: {skipped}");
        }
    }
}

fn sides(row: &Value) -> impl Iterator<Item = u64> {
    row["shape"].as_array().into_iter().flatten().filter_map(Value::as_u64)
}

fn ratio(above: &Value, below: &Value) -> Option<f64> {
    Some(above.as_f64()? / below.as_f64()?)
}

/// Whether two rows are of the same work.
fn is_same(a: &Value, b: &Value) -> bool {
    ["model", "shape", "grouping", "sizes"].iter().all(|key| a[*key] == b[*key])
}

/// Fills the column `speedup`: to the row without FP8 of the same work.
fn to_plain(rows: &mut [Value]) {
    let plain: Vec<_> = rows.iter().filter(|row| row.get("fp8") == Some(&json!(false))).cloned().collect();
    for row in rows.iter_mut().filter(|row| row.get("speedup").is_some()) {
        let plain = plain.iter().find(|plain| is_same(plain, row));
        row["speedup"] = json!(plain.and_then(|plain| ratio(&plain["milliseconds"], &row["milliseconds"])));
    }
}

/// Fills the columns `torch`, with the best FP8 mode, and `torch_bf16`.
fn to_torch(rows: &mut [Value], torch: Option<&Value>) {
    let torch = torch.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    for row in rows.iter_mut().filter(|row| row.get("torch_bf16").is_some()) {
        let Some(same) = torch.iter().find(|torch| is_same(torch, row)) else { continue };
        row["torch_bf16"] = same["bf16"].clone();
        let modes = ["precise", "fast", "rowwise", "rowwise_fast"].iter().filter_map(|mode| same[*mode].as_f64());
        if let Some(best) = modes.reduce(f64::max) {
            row["torch"] = json!(best);
        }
    }
}
