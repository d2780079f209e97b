#!/usr/bin/env bash
# Makes a test authority, certificates for the services, a token and an API key. For tests, not for production: the
# authority's key lies beside what it signed.
#
#   deploy/make-test-authority.sh FOLDER [NAME_OR_ADDRESS...]
#
# Certificates are valid for localhost, 127.0.0.1, ::1, their service's own name (draft, verify, gateway) and the further
# names and addresses given, for 30 days or as many as DAYS says.
set -euo pipefail

if (($# < 1)); then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$1
shift
days=${DAYS:-30}
umask 077
mkdir -p "$folder"
cd "$folder"
if [[ -e ca.pem ]]; then
  echo "error: $folder holds an authority already; remove it or name another folder" >&2
  exit 1
fi

new_key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
openssl req -x509 "${new_key[@]}" -keyout ca-key.pem -out ca.pem -days "$days" -subj "/CN=Draftwood test authority" \
  -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign" 2>/dev/null

for service in draft verify gateway; do
  names="DNS:$service,DNS:localhost,IP:127.0.0.1,IP:::1"
  for name in "$@"; do
    if [[ $name == *:* || $name =~ ^[0-9.]+$ ]]; then names+=",IP:$name"; else names+=",DNS:$name"; fi
  done
  openssl req "${new_key[@]}" -keyout "$service-key.pem" -out "$service.csr" -subj "/CN=draftwood $service" 2>/dev/null
  openssl x509 -req -in "$service.csr" -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days "$days" -out "$service.pem" \
    -extfile <(printf '%s\n' "subjectAltName=$names" "basicConstraints=critical,CA:FALSE" \
      "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth,clientAuth" \
      "subjectKeyIdentifier=hash" "authorityKeyIdentifier=keyid") 2>/dev/null
  rm "$service.csr"
done
openssl rand -hex 32 >token
openssl rand -hex 32 >api-key
echo "made ca.pem, certificates and keys of draft, verify and gateway, token and api-key in $folder"
