//! `training.profile_steps` prints a breakdown, on a CPU and on a GPU, which may be a software adapter.

use crate::support::{has_wgpu, small_on, stdout, text, train};

const WINDOW: [&str; 1] = ["training.profile_steps=[3, 4]"];

/// Log of a four-step run on a device, and the rows of its table.
fn run(device: &str, data: &str, settings: &[&str]) -> (String, Vec<String>) {
    let arguments = small_on(device, data, &[&["training.steps=4"], settings].concat());
    let output = train(&arguments).output().unwrap();
    let log = stdout(&output).to_string();
    let from = log.lines().skip_while(|line| !line.starts_with("profile: "));
    let table = from.skip(3).take_while(|line| !line.starts_with("sum of")).map(String::from).collect();
    (log, table)
}

/// Calls in the row of this kind and name.
fn calls(table: &[String], kind: &str, name: &str) -> u64 {
    let end = format!("  {kind:<11}  {name}");
    let row = table.iter().find_map(|line| line.strip_suffix(&end));
    let row = row.unwrap_or_else(|| panic!("no {name} in\n{}", table.join("\n")));
    row.split_whitespace().last().unwrap().parse().unwrap()
}

#[test]
fn a_gpu_names_the_kernels_of_casts_and_scaled_gemms() {
    if !has_wgpu() {
        return;
    }
    let data = text();
    let (log, table) = run("wgpu", &data.1, &WINDOW);
    assert!(log.contains("profile: steps 3 to 4 on wgpu (") && log.contains("\ntime: "), "{log}");
    assert_eq!(calls(&table, "scaled GEMM", "GemmEmulated"), 3 * 14, "{log}");
    let casts = table.iter().filter_map(|line| line.rsplit_once("  cast         Cast"));
    let casts: u64 = casts.map(|(row, _)| row.split_whitespace().last().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(casts, 14 + 14 + 8, "{log}");
}
