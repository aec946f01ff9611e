//! Models of the Hugging Face Hub by name, `org/name`: from huggingface_hub's cache, or, with the
//! feature `hub`, downloaded into it.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

/// Whether `name` may be one of the Hub's: `org/name`, and no path.
fn is_name(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    matches!(name.split('/').collect::<Vec<_>>()[..], [org, name] if is_part(org) && is_part(name))
}

/// Folder of huggingface_hub's cache: `HF_HUB_CACHE`, `hub` in `HF_HOME`, or the user's.
fn cache() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(env::home_dir()?.join(".cache")));
    let home = || variable("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
    variable("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// Folder of the model `name` of the Hub; `None` if `name` is a path.
///
/// # Errors
/// A model that is neither in the cache nor can be downloaded.
pub(crate) fn folder(name: &str) -> anyhow::Result<Option<PathBuf>> {
    if Path::new(name).exists() || !is_name(name) {
        return Ok(None);
    }
    let cache = cache().context("no cache of the Hub: set HF_HOME")?;
    let model = cache.join(format!("models--{}", name.replace('/', "--")));
    if let Ok(commit) = std::fs::read_to_string(model.join("refs/main")) {
        let snapshot = model.join("snapshots").join(commit.trim());
        if is_complete(&snapshot) {
            return Ok(Some(snapshot));
        }
    }
    download(name, &cache, &model).map(Some)
}

/// Whether the folder has a model's configuration and all its weights.
fn is_complete(folder: &Path) -> bool {
    let index = folder.join("model.safetensors.index.json");
    let index = std::fs::read(index).ok().and_then(|index| serde_json::from_slice::<Value>(&index).ok());
    let weights: Vec<Value> = match index {
        Some(index) => index["weight_map"].as_object().into_iter().flat_map(|map| map.values().cloned()).collect(),
        None => vec!["model.safetensors".into()],
    };
    let exists = |file: &Value| file.as_str().is_some_and(|file| folder.join(file).exists());
    folder.join("config.json").exists() && !weights.is_empty() && weights.iter().all(exists)
}

/// Downloads the configuration, weights and tokenizer of a model into its `folder` of the cache.
/// Returns their folder.
#[cfg(feature = "hub")]
fn download(name: &str, cache: &Path, folder: &Path) -> anyhow::Result<PathBuf> {
    let api = hf_hub::api::sync::ApiBuilder::from_env().with_cache_dir(cache.into()).build()?;
    let model = api.model(name.into());
    let info = model
        .info()
        .with_context(|| format!("there is no folder {name}, and reading the model from the Hub failed"))?;
    let is_wanted = |file: &str| {
        let ends = [".safetensors", ".json", ".jinja", ".txt", "tokenizer.model"];
        !file.contains('/') && ends.iter().any(|end| file.ends_with(end))
    };
    for file in info.siblings.iter().map(|file| &file.rfilename).filter(|file| is_wanted(file)) {
        model.get(file).with_context(|| format!("cannot download {file} of {name}"))?;
    }
    Ok(folder.join("snapshots").join(info.sha))
}

#[cfg(not(feature = "hub"))]
fn download(name: &str, cache: &Path, _: &Path) -> anyhow::Result<PathBuf> {
    anyhow::bail!(
        "there is no folder {name}, and no model of the Hub of this name in {}: download it (`hf download {name}`), or build with the feature `hub`",
        cache.display()
    )
}
