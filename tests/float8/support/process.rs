//! Tests in processes of their own: settings that a process reads once, and untagged linears, which
//! belong to the process.
use std::process::Command;

/// Set in such a process.
const ALONE: &str = "FLOAT8_TEST_IN_ITS_OWN_PROCESS";

/// Output of a test that passed in its own process.
pub struct Printed {
    pub stdout: String,
    pub stderr: String,
}

/// Runs the test `name` of `module`, which is `module_path!()`, in its own process with these
/// environment variables. `None` in that process, where `test` has run.
pub fn alone(module: &str, name: &str, variables: &[(&str, &str)], test: impl FnOnce()) -> Option<Printed> {
    if std::env::var_os(ALONE).is_some() {
        test();
        return None;
    }
    let (_, module) = module.split_once("::").expect("a module of a test program");
    let mut command = Command::new(std::env::current_exe().expect("a test program"));
    command.args(["--exact", &format!("{module}::{name}"), "--nocapture", "--color=never"]).env(ALONE, "1");
    let output = command.envs(variables.iter().copied()).output().expect("the test starts");
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
    Some(Printed { stdout, stderr })
}
