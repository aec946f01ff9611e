//! Compiler errors of programs that must not compile. They use the dependencies that cargo has
//! built for this test: checking them again, as trybuild does, takes minutes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use tempfile::TempDir;

/// Program that applies a recipe to a model of this backend.
fn program(backend: &str) -> String {
    format!(
        "use compile_fail::burn::backend::{{Autodiff, Flex}};
         use compile_fail::burn::nn::{{Linear, LinearConfig}};
         use compile_fail::burn_float8::{{Float8, Float8Config}};

         fn main() {{
             let model: Linear<{backend}> = LinearConfig::new(8, 8).init(&Default::default());
             let _ = Float8Config::tensorwise().apply(model);
         }}"
    )
}

/// Library of this package, next to the dependencies that it was built with.
fn library(folder: &Path) -> PathBuf {
    let built = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let libraries = built.filter(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libcompile_fail-") && name.ends_with(".rlib")
    });
    libraries.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).expect("cargo has built it")
}

fn compile(program: &str) -> Output {
    let (executable, folder) = (env::current_exe().unwrap(), TempDir::new().unwrap());
    let built = executable.parent().unwrap();
    let source = folder.path().join("main.rs");
    fs::write(&source, program).unwrap();
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--emit=metadata", "--out-dir"]).arg(folder.path()).arg(&source);
    rustc.arg("--extern").arg(format!("compile_fail={}", library(built).display()));
    rustc.arg("-L").arg(format!("dependency={}", built.display()));
    rustc.output().unwrap()
}

#[test]
fn float8_in_float8_is_explained() {
    let said = compile(&program("Float8<Float8<Autodiff<Flex>>>")).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("write `Float8<B>` in place of `Float8<Float8<B>>`"), "{said}");
}

#[test]
fn float8_below_autodiff_is_explained() {
    let right = compile(&program("Float8<Autodiff<Flex>>"));
    assert!(right.status.success(), "{}", String::from_utf8_lossy(&right.stderr));

    // Below autodiff a backward pass would not know its linear.
    let wrong = compile(&program("Autodiff<Float8<Flex>>"));
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success());
    for sentence in [
        "is not a `Float8` backend: Float8 wraps the backend that you train with",
        "write `Float8<Autodiff<B>>`, also in place of `Autodiff<Float8<B>>`",
    ] {
        assert!(said.contains(sentence), "{said}");
    }
}
