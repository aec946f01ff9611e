//! Added tokens, which only the files next to a `tokenizer.json` list.

use std::path::Path;

use anyhow::{Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::{ConfigFile, SPECIAL_TOKENS, limits, not_valid};

/// Key of the tokens by id.
const DECODER: &str = "added_tokens_decoder";
/// File with the ids of tokens. It adds tokens only if `tokenizer_config.json` has no [`DECODER`].
const FILE: &str = "added_tokens.json";
/// File with special tokens. It is read if `tokenizer_config.json` has no [`DECODER`].
const SPECIAL_FILE: &str = "special_tokens_map.json";
/// Keys of lists of special tokens without ids. These follow the tokens with separate keys.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// Adds the tokens that only the files next to the file `path` of `tokenizer` list, in the order in
/// which transformers adds them, and returns them. An id of another token is an error.
pub(super) fn add(tokenizer: &mut tokenizers::Tokenizer, path: &Path) -> Result<Vec<AddedToken>> {
    let read = |name| ConfigFile::read(path.with_file_name(name));
    let (config, file, mut special) = (read("tokenizer_config.json")?, read(FILE)?, read(SPECIAL_FILE)?);
    let decoder = config.get(DECODER);
    if decoder.is_some() {
        special.map.clear();
    }
    let is_special = |token: &str| config.has_special(token) || special.has_special(token);
    let of_file = file.map.iter().map(|(content, id)| {
        (Some(id.clone()), json!({ "content": content, "special": is_special(content) }), &file, FILE)
    });
    // Id and token, with the file and the key that list them.
    let mut listed: Vec<(Option<Value>, Value, &ConfigFile, &'static str)> = vec![];
    match decoder {
        Some(tokens) => {
            let tokens = tokens.as_object().ok_or_else(|| config.no_token(DECODER, tokens))?;
            for (id, token) in tokens {
                listed.push((Some(id.parse::<i64>().unwrap_or(-1).into()), token.clone(), &config, DECODER));
            }
        }
        None => listed.extend(of_file.clone()),
    }
    listed.sort_by_key(|(id, ..)| id.as_ref().and_then(Value::as_u64));
    let ones = SPECIAL_TOKENS.map(|key| (key, true));
    for (key, is_one) in ones.into_iter().chain(LISTS.map(|key| (key, false))) {
        // If both files have the key, single tokens come from the older one, and lists from the
        // newer one.
        let is_older = if is_one { special.get(key).is_some() } else { config.get(key).is_none() };
        let file = if is_older { &special } else { &config };
        let tokens: Vec<&Value> = match file.get(key) {
            Some(Value::Array(tokens)) if !is_one => tokens.iter().collect(),
            Some(Value::Object(tokens)) if !is_one => tokens.values().collect(),
            token => token.filter(|token| **token != "").into_iter().collect(),
        };
        for token in tokens {
            let mut token = if token.is_string() { json!({ "content": token }) } else { token.clone() };
            if let Some(token) = token.as_object_mut() {
                token.insert("special".into(), true.into());
            }
            listed.push((None, token, file, key));
        }
    }
    if decoder.is_some() {
        listed.extend(of_file);
    }
    let mut new = vec![];
    for (id, value, file, key) in listed {
        let wrong = || file.no_token(key, &id.as_ref().map_or_else(|| value.clone(), |id| json!([id, value])));
        let token = token(&value).filter(|token| !token.content.is_empty()).ok_or_else(wrong)?;
        let to_id = |id: &Value| u32::try_from(id.as_u64()?).ok();
        let id = id.as_ref().map(|id| to_id(id).ok_or_else(wrong)).transpose()?;
        limits::check_part("added_tokens", "", &value).map_err(|reason| limits::refused(&file.path, reason))?;
        let must_be_there = key == FILE && decoder.is_some();
        if !must_be_there && !tokenizer.get_added_vocabulary().get_vocab().contains_key(&token.content) {
            tokenizer.add_tokens([token.clone()]).map_err(|error| not_valid(&file.path, error))?;
            new.push(token.clone());
        }
        let (Some(id), found) = (id, tokenizer.token_to_id(&token.content)) else { continue };
        if found != Some(id) {
            let taken = tokenizer.id_to_token(id).map(|taken| format!("{id} is {taken:?}, and ")).unwrap_or_default();
            let found = match found {
                Some(found) => format!("gives it {found}: new tokens follow those of tokenizer.json, without gaps"),
                None => "does not have it: added_tokens_decoder of tokenizer_config.json must list it".into(),
            };
            let (path, token) = (file.path.display(), &token.content);
            bail!("{path}: {token:?} has the id {id}, but {taken}the tokenizer {found}");
        }
    }
    Ok(new)
}

/// Token with defaults for missing fields.
fn token(value: &Value) -> Option<AddedToken> {
    let given = value.as_object()?;
    let special = given.get("special").and_then(Value::as_bool).unwrap_or(false);
    let defaults =
        json!({ "single_word": false, "lstrip": false, "rstrip": false, "normalized": !special, "special": special });
    let mut all: Map<String, Value> = defaults.as_object()?.clone();
    all.extend(given.clone());
    AddedToken::deserialize(Value::Object(all)).ok()
}
