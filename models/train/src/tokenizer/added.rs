//! Tokens that only the files beside a `tokenizer.json` know.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::{ConfigFile, TokenizerError, limits};

/// Tokens by their ids.
const DECODER: &str = "added_tokens_decoder";
/// Ids of tokens, where `tokenizer_config.json` has none.
const FILE: &str = "added_tokens.json";
/// Special tokens without ids, which follow the others.
const WITHOUT_IDS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// A token, and the id that a file says it has.
pub(super) struct Added {
    token: AddedToken,
    id: Option<u32>,
    path: PathBuf,
}

/// The tokens that the files beside `tokenizer` list, in the order in which transformers adds them.
///
/// # Errors
/// Any [`TokenizerError`] about these files.
pub(super) fn beside(tokenizer: &Path) -> Result<Vec<Added>, TokenizerError> {
    let [config, file] = ["tokenizer_config.json", FILE].map(|name| ConfigFile::read(tokenizer.with_file_name(name)));
    let (config, file) = (config?, file?);
    // Each with its id, and the file and the key that have it.
    let mut listed: Vec<(Option<Value>, Value, &ConfigFile, &'static str)> = vec![];
    match config.get(DECODER) {
        Some(tokens) => {
            let tokens = tokens.as_object().ok_or_else(|| config.no_token(DECODER, tokens))?;
            for (id, token) in tokens {
                listed.push((Some(id.parse::<i64>().unwrap_or(-1).into()), token.clone(), &config, DECODER));
            }
        }
        None => listed.extend(file.map.iter().map(|(content, id)| {
            (Some(id.clone()), json!({ "content": content, "special": config.has_special(content) }), &file, FILE)
        })),
    }
    listed.sort_by_key(|(id, ..)| id.as_ref().and_then(Value::as_u64));
    for key in WITHOUT_IDS {
        let tokens: Vec<&Value> = match config.get(key) {
            Some(Value::Array(tokens)) => tokens.iter().collect(),
            Some(Value::Object(tokens)) => tokens.values().collect(),
            tokens => tokens.into_iter().collect(),
        };
        for token in tokens {
            let content = if token.is_string() { token } else { &token["content"] };
            listed.push((None, json!({ "content": content, "special": true }), &config, key));
        }
    }
    let mut added = vec![];
    for (id, value, file, key) in listed {
        let wrong = || file.no_token(key, &json!([id, value]));
        let token = token(&value).filter(|token| !token.content.is_empty()).ok_or_else(wrong)?;
        let to_id = |id: &Value| u32::try_from(id.as_u64()?).ok();
        let id = id.as_ref().map(|id| to_id(id).ok_or_else(wrong)).transpose()?;
        let path = file.path.clone();
        let refused = |reason| TokenizerError::Limit { path: path.clone(), reason };
        limits::check_part("added_tokens", "", &value).map_err(refused)?;
        added.push(Added { token, id, path });
    }
    Ok(added)
}

/// A token with defaults for what its file does not say.
fn token(value: &Value) -> Option<AddedToken> {
    let given = value.as_object()?;
    let special = given.get("special").and_then(Value::as_bool).unwrap_or(false);
    let defaults =
        json!({ "single_word": false, "lstrip": false, "rstrip": false, "normalized": !special, "special": special });
    let mut all: Map<String, Value> = defaults.as_object()?.clone();
    all.extend(given.clone());
    AddedToken::deserialize(Value::Object(all)).ok()
}

/// Adds the tokens that a tokenizer does not have yet, and gives these.
///
/// # Errors
/// [`TokenizerError::AddedToken`] for one that the tokenizer gives another id than its file.
pub(super) fn add(tokenizer: &mut tokenizers::Tokenizer, all: Vec<Added>) -> Result<Vec<AddedToken>, TokenizerError> {
    let mut new = vec![];
    for Added { token, id, path } in all {
        if !tokenizer.get_added_vocabulary().get_vocab().contains_key(&token.content) {
            let added = tokenizer.add_tokens([token.clone()]);
            added.map_err(|error| TokenizerError::HuggingFace { path: path.clone(), reason: error.to_string() })?;
            new.push(token.clone());
        }
        let (Some(id), found) = (id, tokenizer.token_to_id(&token.content)) else { continue };
        if found != Some(id) {
            let (taken, token) = (tokenizer.id_to_token(id).map(Into::into), token.content.into());
            let path = path.into();
            return Err(TokenizerError::AddedToken { path, token, id, found: found.unwrap_or_default(), taken });
        }
    }
    Ok(new)
}
