//! `benches/run.sh` from end to end, with programs in the place of `float8-gpu` and NVIDIA's that note how they were called: a slip of the
//! pen would cost the first run on a GPU.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use checks::{Size, visit};
use codegen::device::{GenerateCuda, OfflineDevice};
use cubecl::prelude::Runtime;
use tempfile::TempDir;

/// What the fake `float8-gpu` notes of each call: where its headers are, and its arguments.
const PROGRAM: &str = r#"#!/bin/bash
printf '%s\n' "$(readlink -f "${CUDA_PATH:-none}/include/mma.h")|$LD_LIBRARY_PATH|$*" >>"$CALLS"
case " $* " in *" $FAILS "*) exit 1 ;; esac
"#;

struct Bundle {
    folder: TempDir,
}

impl Bundle {
    /// A bundle, and a machine with a driver of CUDA 13.0, the toolkits 12.8 and 13.5 and the wheels of 13.0. Nothing without Python,
    /// which the test says.
    fn new() -> Option<Self> {
        if Command::new("python3").args(["-c", "import lzma"]).status().is_ok_and(|status| status.success()) {
            let bundle = Self { folder: TempDir::new().expect("a folder for temporary files") };
            bundle.fill();
            return Some(bundle);
        }
        assert!(std::env::var_os("CI").is_none(), "CI needs python3");
        writeln!(std::io::stdout(), "skipped: no python3 with lzma").expect("standard output is open");
        None
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("in the folder")).expect("writable");
        fs::write(&path, text).expect("writable");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("ours");
    }

    fn fill(&self) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("run.sh");
        fs::create_dir(self.path("bundle")).expect("writable");
        fs::copy(source, self.path("bundle/run.sh")).expect("run.sh is there");
        self.write("float8-gpu", PROGRAM);
        let pack = "import lzma, sys; lzma.open(sys.argv[2], 'wb').write(open(sys.argv[1], 'rb').read())";
        let packed = Command::new("python3")
            .args(["-c", pack])
            .args([self.path("float8-gpu"), self.path("bundle/float8-gpu.xz")])
            .status();
        assert!(packed.expect("python3 runs").success());
        self.write(
            "bin/nvidia-smi",
            "#!/bin/bash\ncase \"$*\" in *query*) echo 'timestamp, clocks'; sleep 600 ;; *) echo '| CUDA Version: 13.0 |' ;; esac\n",
        );
        for tool in ["ncu", "compute-sanitizer"] {
            self.write(&format!("bin/{tool}"), "#!/bin/bash\necho no permission; exit 9\n");
        }
        for (root, version) in [("old", "12.8.93"), ("new", "13.5.1"), ("python/nvidia/cu13", "13.0.88")] {
            self.write(&format!("{root}/lib/libnvrtc.so.{version}"), "");
            for header in ["mma.h", "cuda_fp16.h", "cooperative_groups.h", "cccl/cuda/barrier", "cccl/nv/target"] {
                self.write(&format!("{root}/include/{header}"), "");
            }
        }
        self.write("python/nvidia/__init__.py", "");
        symlink(self.path("old"), self.path("cuda")).expect("writable");
    }

    /// Runs it where one of the calls fails, and the toolkit `asked` is named.
    fn run(&self, fails: &str, asked: Option<&str>) -> (Output, Vec<String>) {
        let calls = self.path("calls");
        fs::write(&calls, "").expect("writable");
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").expect("a path"));
        let mut command = Command::new("bash");
        command
            .arg(self.path("bundle/run.sh"))
            .args(["--minutes", "30"])
            .env("PATH", path)
            .env("PYTHONPATH", self.path("python"))
            .env("CALLS", &calls)
            .env("FAILS", fails)
            .env_remove("CUDA_PATH")
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("OUT");
        if let Some(asked) = asked {
            command.env("CUDA_PATH", self.path(asked));
        }
        let output = command.output().expect("bash runs");
        let calls = fs::read_to_string(&calls).expect("written").lines().map(String::from).collect();
        (output, calls)
    }

    /// The arguments of each call of the program, from the log, which quotes them: they have blanks in them. `versions` is called by a
    /// shell and left out.
    fn arguments(&self) -> Vec<Vec<String>> {
        let log = fs::read_to_string(self.path("bundle/log.txt")).expect("written");
        let steps = log.lines().filter(|line| line.starts_with("== "));
        // Before the program's name stands what runs it: `env`, `ncu`.
        let calls = steps.filter_map(|line| line.split_once("/float8-gpu' '")).map(|(_, arguments)| arguments);
        calls.map(|call| call.trim_end_matches('\'').split("' '").map(String::from).collect()).collect()
    }

    fn summary(&self) -> Vec<String> {
        let summary = fs::read_to_string(self.path("bundle/summary.txt")).expect("written");
        summary.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
    }
}

#[test]
fn all_steps_run_in_their_order() {
    let Some(bundle) = Bundle::new() else { return };
    let (output, calls) = bundle.run("nothing", None);
    let log = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{log}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let passed = [
        "versions", "smallest", "first", "casts", "exact", "clusters", "repeated", "gemm", "host", "few", "gemv",
        "sweep", "linears",
    ];
    let then = ["beside", "linear", "step", "rest"];
    let mut want: Vec<_> = passed.iter().chain(&then).map(|step| format!("{step} passed")).collect();
    want.insert(0, "torch not".into());
    // Containers forbid these tools.
    want.extend(["memcheck FAILED", "synccheck FAILED", "ncu FAILED", "full passed"].map(String::from));
    assert_eq!(bundle.summary(), want, "{log}");
    // The newest that the driver reads: the wheels', not the toolkit of 13.5. A real toolkit of this machine may be as new.
    let of_wheels = |call: &&String| call.contains("/python/nvidia/cu13/") || call.contains("/usr/local/cuda");
    assert_eq!(calls.iter().filter(of_wheels).count(), calls.len(), "{calls:#?}");
    assert!(bundle.path("bundle/clocks.csv").exists());
}

/// Every name that is asked for is that of a check on a Hopper GPU.
#[test]
fn names_are_those_of_checks() {
    let Some(bundle) = Bundle::new() else { return };
    let (_, calls) = bundle.run("nothing", None);
    let mut names = BTreeSet::new();
    visit(&GenerateCuda::client(&OfflineDevice::new(90)), Size::Full, &mut |case| {
        names.insert(case.name);
    });
    let mut asked = 0;
    let checks = bundle.arguments().into_iter().filter(|call| call.iter().any(|word| word == "check"));
    for call in checks {
        for name in call.windows(2).filter(|pair| pair[0] == "--only").map(|pair| &pair[1]) {
            // Goldens and linears are no cases of a runtime alone.
            if name.starts_with("golden_") || name.contains("256x512x384") {
                continue;
            }
            assert!(names.iter().any(|case| case.contains(name)), "no check has the name {name:?}");
            asked += 1;
        }
    }
    assert!(asked >= 8 && calls.len() > 10, "{asked} names in {calls:#?}");
}

/// The program itself takes every call: it ends for want of a device, not for an argument.
#[test]
fn the_program_takes_all_calls() {
    let Some(bundle) = Bundle::new() else { return };
    bundle.run("--only scaled_gemm 64x64x64 e4m3,e4m3", None);
    let calls = bundle.arguments();
    for call in &calls {
        let mut program = Command::new(env!("CARGO_BIN_EXE_float8-gpu"));
        // A driver shows no device then.
        let output = program.args(call).env("CUDA_VISIBLE_DEVICES", "").output().expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && error.starts_with("error: CUDA is not usable: "),
            "{call:?}: {error}"
        );
    }
    assert!(calls.len() >= 16, "{calls:#?}");
}

#[test]
fn a_failure_is_looked_at_with_traps_and_fails_the_run() {
    let Some(bundle) = Bundle::new() else { return };
    let (output, _) = bundle.run("--only scaled_gemm 64x64x64 e4m3,e4m3", None);
    assert_eq!(output.status.code(), Some(1));
    let summary = bundle.summary();
    assert!(summary.windows(2).any(|lines| lines == ["smallest FAILED", "trapped FAILED"]), "{summary:?}");
    assert!(summary.contains(&"first passed".into()), "{summary:?}");
}

#[test]
fn the_toolkit_that_is_asked_for_is_taken() {
    let Some(bundle) = Bundle::new() else { return };
    let (output, calls) = bundle.run("nothing", Some("cuda"));
    assert!(output.status.success());
    assert!(calls.iter().all(|call| call.contains("/old/include/mma.h|")), "{calls:#?}");
    let (output, _) = bundle.run("versions", None);
    assert_eq!(output.status.code(), Some(2), "without a device there is nothing to do");
}
