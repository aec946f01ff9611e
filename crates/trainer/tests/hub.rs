//! Models by their names on the Hugging Face Hub: from its cache and, with the feature `hub`, from a
//! local server.

use std::path::Path;
use std::{env, fs};

use clap::Parser;
use models::Decoders;
use trainer::cli::Command;

/// Output of `float8 config show --model MODEL`.
fn shown(model: &str) -> Result<String, String> {
    let mut printed = vec![];
    let command = Command::try_parse_from(["float8", "config", "show", "--model", model]).unwrap();
    command.job::<Decoders>(&mut printed).map_err(|error| format!("{:#}", error))?;
    Ok(String::from_utf8(printed).unwrap())
}

fn write(file: &Path, text: &str) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, text).unwrap();
}

/// One test, since all of it depends on the environment.
#[test]
fn a_model_is_named_as_on_the_hub() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: this process has no other thread that reads the environment.
    unsafe {
        env::set_var("HF_HOME", home.path());
        env::remove_var("HF_HUB_CACHE");
        env::set_var("HF_ENDPOINT", server::start());
    }
    let folder = |model: &str, commit: &str| home.path().join(format!("hub/models--{model}/snapshots/{commit}"));

    let cached = folder("org--cached", "c0ffee");
    write(&home.path().join("hub/models--org--cached/refs/main"), "c0ffee\n");
    write(&cached.join("config.json"), "{}");
    write(
        &cached.join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#,
    );
    write(&cached.join("1.safetensors"), "");
    // A shard is missing, so the cache alone is not enough; the server does not know the model.
    let error = shown("org/cached").unwrap_err();
    assert!(error.contains("org/cached"), "{error}");
    write(&cached.join("2.safetensors"), "");
    assert!(shown("org/cached").unwrap().contains(&format!("hf_path = \"{}\"", cached.display())));

    let served = shown("org/served");
    if cfg!(feature = "hub") {
        let served_folder = folder("org--served", server::COMMIT);
        assert!(served.unwrap().contains(&format!("hf_path = \"{}\"", served_folder.display())));
        let names =
            fs::read_dir(&served_folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"], "and no README, no folders");
        assert_eq!(fs::read_to_string(served_folder.join("config.json")).unwrap(), server::text("config.json"));
    } else {
        let error = served.unwrap_err();
        let said = ["there is no folder org/served, and no model of the Hub of this name in", "feature `hub`"];
        assert!(said.iter().all(|part| error.contains(part)), "{error}");
    }
    // A preset, and a path.
    assert!(shown("qwen3-0.6b").unwrap().contains("preset = \"qwen3-0.6b\""));
    let path = cached.display().to_string();
    assert!(shown(&path).unwrap().contains(&format!("hf_path = \"{path}\"")));
}

/// A Hub with one model.
mod server {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};

    pub(super) const COMMIT: &str = "5e17ed";
    const FILES: [&str; 5] =
        ["README.md", "config.json", "model.safetensors", "original/params.json", "tokenizer.json"];

    /// Contents of a file.
    pub(super) fn text(file: &str) -> String {
        format!("contents of {file}")
    }

    /// Starts the server. Returns its address.
    pub(super) fn start() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || listener.incoming().for_each(|stream| answer(stream.unwrap())));
        address
    }

    fn answer(mut stream: TcpStream) {
        let lines: Vec<_> =
            BufReader::new(&stream).lines().map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
        let path = lines[0].split(' ').nth(1).unwrap_or_default();
        let range =
            lines.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(String::from));
        let body = match path.strip_prefix("/org/served/resolve/main/") {
            Some(file) => text(file),
            None if path.starts_with("/api/models/org/served") => {
                let files: Vec<_> = FILES.iter().map(|file| serde_json::json!({ "rfilename": file })).collect();
                serde_json::json!({ "sha": COMMIT, "siblings": files }).to_string()
            }
            None => {
                stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
                return;
            }
        };
        let whole = (0, body.len() - 1);
        let (first, last) = range.map_or(whole, |range| {
            let (first, last) = range.split_once('-').unwrap();
            (first.parse().unwrap(), last.parse().map_or(whole.1, |last: usize| last.min(whole.1)))
        });
        let (status, size) = (if (first, last) == whole { "200 OK" } else { "206 Partial Content" }, body.len());
        write!(
            stream,
            "HTTP/1.1 {status}\r\nx-repo-commit: {COMMIT}\r\netag: \"{:x}\"\r\ncontent-range: bytes {first}-{last}/{size}\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{}",
            path.len() * 1000 + size,
            last + 1 - first,
            &body[first..=last],
        )
        .unwrap();
    }
}
